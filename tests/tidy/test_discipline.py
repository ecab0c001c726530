"""Habits that hold everywhere: one place for the environment, no swallowed errors, no leftovers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROAD = {"Exception", "BaseException"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
PRINTS = {"print", "pprint"}
SLEEPS = {"time.sleep", "sleep", "asyncio.sleep"}
# A comment that says more than which rule it silences.
EXPLANATION = re.compile(r"#[ :]*(?:noqa: [A-Z0-9, ]+)?[^\w]*\w+ \w+")
# Written in parts, so that this file does not hold what it looks for.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.}])/(wo" r"rk|ro" r"ot|far" r"m|home/\w+|Users)/\w|\.libr" r"ary/")
VAGUE = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)\d*$")
VENDOR = re.compile(r"(?m)^[ \t]*#[ \t]*(?:el)?if.*\b(?:USE_\w+|\w*(?:CUDA|ROCM|HIP|MUSA|ASCEND|EFA)\w*)")
# They end the process when the interpreter ends while a daemon thread is in them; support/gil.hpp does not.
CPP_GIL = re.compile(r"\bgil_scoped_(?:release|acquire)\b|\bPyGILState_Ensure\b|\bPyEval_RestoreThread\b")
CPP_ENVIRONMENT = re.compile(r"\b(?:secure_)?getenv\b|\benviron\b")


def environment_reads(tree: ast.Module) -> Iterator[int]:
    """Give the lines that touch the process environment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            continue
        if names & ENVIRONMENT:
            yield node.lineno


def print_calls(tree: ast.Module) -> Iterator[int]:
    """Give the lines that call the builtin print."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PRINTS:
            yield node.lineno


def unexplained_broad_excepts(text: str, tree: ast.Module) -> Iterator[int]:
    """Give the lines of handlers that swallow any error and have no comment on, above or right below them."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler) or not _is_broad(node.type) or _raises_again(node):
            continue
        near = lines[max(node.lineno - 2, 0) : node.lineno + 1]
        if not any(EXPLANATION.search(line) for line in near):
            yield node.lineno


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def bare_sleeps(tree: ast.Module) -> Iterator[int]:
    """Give the lines that wait on time: a sleep outside a loop. `sleep(0)` only yields."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While | ast.For)]
    looped = {id(inner) for loop in loops for inner in ast.walk(loop)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in looped or ast.unparse(node.func) not in SLEEPS:
            continue
        if not all(isinstance(argument, ast.Constant) and argument.value == 0 for argument in node.args):
            yield node.lineno


def matches(text: str, pattern: re.Pattern[str]) -> Iterator[int]:
    """Give the line of every match."""
    for found in pattern.finditer(text):
        yield text.count("\n", 0, found.start()) + 1


def at(source: Any, lines: Iterator[int]) -> list[str]:
    """Turn lines of a file into places to click on."""
    return [f"{source.path}:{line}" for line in lines]


def test_the_environment_is_read_in_config_only(library: list[Any], cpp_sources: list[Any]) -> None:
    places = [
        place
        for source in library
        if Path(source.path).name != "config.py"
        for place in at(source, environment_reads(source.tree))
    ]
    # A double of a vendor's library has no other way to be told by a test what to be.
    cores = [source for source in cpp_sources if not source.is_test]
    places += [place for source in cores for place in at(source, matches(source.text, CPP_ENVIRONMENT))]
    assert not places, "\n".join(places)


def test_library_code_does_not_print(library: list[Any]) -> None:
    places = [place for source in library for place in at(source, print_calls(source.tree))]
    assert not places, "\n".join(places)


def test_a_handler_for_any_error_says_why(library: list[Any]) -> None:
    places = [
        place
        for source in library
        for place in at(source, unexplained_broad_excepts(source.text, source.tree))
    ]
    assert not places, "\n".join(places)


def test_tests_wait_on_conditions_not_on_time(python_sources: list[Any]) -> None:
    tests = [source for source in python_sources if source.is_test]
    places = [place for source in tests for place in at(source, bare_sleeps(source.tree))]
    assert not places, "\n".join(places)


def test_nothing_is_marked_unfinished(sources: list[Any]) -> None:
    places = [place for source in sources for place in at(source, matches(source.text, UNFINISHED))]
    assert not places, "\n".join(places)


def test_no_file_names_a_path_of_a_machine(sources: list[Any]) -> None:
    places = [place for source in sources for place in at(source, matches(source.text, MACHINE_PATH))]
    assert not places, "\n".join(places)


def test_shared_cpp_code_has_no_vendor_switch(cpp_sources: list[Any]) -> None:
    places = [place for source in cpp_sources for place in at(source, matches(source.text, VENDOR))]
    assert not places, "\n".join(places)


def test_bindings_take_the_interpreters_lock_in_one_place(cpp_sources: list[Any]) -> None:
    elsewhere = [source for source in cpp_sources if Path(source.path).name != "gil.hpp"]
    places = [place for source in elsewhere for place in at(source, matches(source.text, CPP_GIL))]
    assert not places, "\n".join(places)


def test_every_module_is_named_for_what_it_holds(sources: list[Any]) -> None:
    code = [source.path for source in sources if Path(source.path).suffix in {".py", ".cpp", ".hpp"}]
    vague = [path for path in code if any(VAGUE.search(part.split(".")[0]) for part in Path(path).parts)]
    assert not vague, "\n".join(vague)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']\n",
        "import os\nx = os.getenv('A')\n",
        "from os import path\nfrom os import environ\n",
    ],
)
def test_the_checker_finds_an_environment_read(source: str) -> None:
    assert list(environment_reads(ast.parse(source))) == [2]


def test_the_checker_finds_a_print_but_not_one_of_a_console() -> None:
    assert list(print_calls(ast.parse("console.print(1)\nprint(2)\n"))) == [2]


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except Exception:\n    pass", [3]),
        ("except:\n    pass", [3]),
        ("except (OSError, BaseException) as e:\n    raise A from e", [3]),
        ("except BaseException:\n    close()\n    raise", []),
        ("except Exception:  # noqa: BLE001\n    pass", [3]),
        ("except Exception:  # noqa: BLE001 - a plugin may raise anything\n    pass", []),
        ("except Exception:  # a plugin may raise anything\n    pass", []),
        ("except Exception:\n    # a plugin may raise anything\n    pass", []),
        ("except OSError:\n    pass", []),
    ],
)
def test_the_checker_finds_an_unexplained_broad_except(handler: str, found: list[int]) -> None:
    text = f"try:\n    f()\n{handler}\n"
    assert list(unexplained_broad_excepts(text, ast.parse(text))) == found


def test_the_checker_finds_a_sleep_that_waits_on_time() -> None:
    text = "time.sleep(1)\nwhile not ready():\n    time.sleep(0.01)\nasyncio.sleep(0)\n"
    assert list(bare_sleeps(ast.parse(text))) == [1]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("# TO" + "DO later", UNFINISHED),
        ("see /ro" + "ot/x", MACHINE_PATH),
        ("'/home/" + "someone/x'", MACHINE_PATH),
        ("#ifdef USE_CUDA", VENDOR),
        ("#if defined(WITH_ROCM)", VENDOR),
        ('  auto* x = std::getenv("A");', CPP_ENVIRONMENT),
        ("    nb::gil_scoped_release release;", CPP_GIL),
    ],
)
def test_the_patterns_find_their_fault(text: str, pattern: re.Pattern[str]) -> None:
    assert list(matches(f"\n{text}\n", pattern)) == [2]


def test_the_patterns_take_what_is_fine() -> None:
    assert not MACHINE_PATH.search("src/work/a.py https://x.org/home/a {root}/work/x")
    assert not VENDOR.search("#ifdef __cplusplus\n#ifndef MOONCAKE_DRIVER_H")
    assert VAGUE.search("string_utils")
    assert not VAGUE.search("manage")
