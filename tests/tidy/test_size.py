"""Files, functions and lines stay within their budgets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_COLUMNS = 110
MAX_FUNCTION_LINES = 70
WIDE_SUFFIXES = {".py", ".cpp", ".hpp", ".h", ".toml", ".sh"}


def file_budget(path: str, is_test: bool) -> int | None:
    """Return how many lines a file may have, or None when there is no limit."""
    suffix = Path(path).suffix
    if suffix == ".py":
        return 500 if is_test else 600
    return {".cpp": 500 if is_test else 800, ".hpp": 300, ".h": 300}.get(suffix)


def long_python_functions(tree: ast.Module) -> Iterator[str]:
    """Name the functions whose lines, without their docstring, are over the budget."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines -= docstring.end_lineno - docstring.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"


LITERALS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
# What stands before a brace that opens no function: a scope, a type, an initialiser.
NOT_A_FUNCTION = re.compile(r"\b(namespace|class|struct|enum|union|extern)\b|=\s*$|^\s*$")


def long_cpp_functions(text: str) -> Iterator[str]:
    """Name the outermost functions that are over the budget; the text is as clang-format leaves it."""
    plain = LITERALS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    plain = re.sub(
        r"^[ \t]*#(?:.*\\\n)*.*$", lambda found: "\n" * found[0].count("\n"), plain, flags=re.MULTILINE
    )
    depth_of_function: int | None = None
    depth, start, line, opened = 0, 0, 1, 0
    name = ""
    for at, char in enumerate(plain):
        if char == "\n":
            line += 1
        elif char == "{":
            head = plain[start:at]
            if depth_of_function is None and ")" in head and not NOT_A_FUNCTION.search(head):
                depth_of_function, name = depth, " ".join(head.split())
                opened = line - head.lstrip().count("\n")
            depth += 1
            start = at + 1
        elif char == "}":
            depth -= 1
            start = at + 1
            if depth == depth_of_function:
                depth_of_function = None
                if line - opened + 1 > MAX_FUNCTION_LINES:
                    yield f"{name} has {line - opened + 1} lines"
        elif char == ";":
            start = at + 1


def test_no_file_is_over_its_budget(sources: list[Any]) -> None:
    over = []
    for source in sources:
        budget = file_budget(source.path, source.is_test)
        lines = source.text.count("\n")
        if budget is not None and lines > budget:
            over.append(f"{source.path}: {lines} lines, budget {budget}")
    assert not over, "\n".join(over)


def test_no_python_function_is_over_seventy_lines(python_sources: list[Any]) -> None:
    over = [
        f"{source.path}: {fault}" for source in python_sources for fault in long_python_functions(source.tree)
    ]
    assert not over, "\n".join(over)


def test_no_cpp_function_is_over_seventy_lines(cpp_sources: list[Any]) -> None:
    over = [f"{source.path}: {fault}" for source in cpp_sources for fault in long_cpp_functions(source.text)]
    assert not over, "\n".join(over)


def test_no_line_is_over_110_columns(sources: list[Any]) -> None:
    over = [
        f"{source.path}:{number}: {len(line)} columns"
        for source in sources
        if Path(source.path).suffix in WIDE_SUFFIXES
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > MAX_COLUMNS and "://" not in line
    ]
    assert not over, "\n".join(over)


def test_the_checker_finds_a_long_python_function() -> None:
    body = "    x = 1\n"
    short = "def f():\n" + '    """Say.\n\n' + "    more\n" * 50 + '    """\n' + body * 69
    assert list(long_python_functions(ast.parse(short))) == []
    assert list(long_python_functions(ast.parse(short + body))) == ["f has 71 lines"]
    nested = "class A:\n    async def g(self):\n" + "        x = 1\n" * 70
    assert list(long_python_functions(ast.parse(nested))) == ["g has 71 lines"]


def test_the_checker_finds_a_long_cpp_function_in_its_namespace_and_class() -> None:
    def method(lines: int) -> str:
        body = "    if (x) {\n      y('{', \"}\");  // }\n    }\n" + "    x();\n" * (lines - 6)
        return (
            "namespace a {\nclass B {\n  int f(int x,\n        int y) const {\n"
            + body
            + "  }\n};\n}  // namespace a\n"
        )

    assert list(long_cpp_functions(method(70))) == []
    assert list(long_cpp_functions(method(71))) == ["int f(int x, int y) const has 71 lines"]
    table = "const Table kTable = {\n" + "    {1, f(2)},\n" * 100 + "};\n"
    assert list(long_cpp_functions(table)) == []
    macro = "#define A(x) \\\n  do { \\\n  } while (0)\n"
    assert list(long_cpp_functions(macro + method(71))) == ["int f(int x, int y) const has 71 lines"]


def test_budgets_are_those_of_the_style_page() -> None:
    assert file_budget("a/src/b.py", is_test=False) == 600
    assert file_budget("a/tests/b.py", is_test=True) == 500
    assert file_budget("a/core/b.cpp", is_test=False) == 800
    assert file_budget("a/core/b.hpp", is_test=False) == file_budget("abi/c.h", is_test=False) == 300
    assert file_budget("README.md", is_test=False) is None
