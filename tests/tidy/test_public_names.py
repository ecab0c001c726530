"""What is public is documented and listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# A setter and an overload are described where the property or the implementation is.
DESCRIBED_ELSEWHERE = {"overload", "override", "setter", "deleter"}


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Name the public module, classes, functions and methods that have no docstring."""
    if ast.get_docstring(tree) is None:
        yield "the module"
    yield from _undocumented_in(tree, "")


def _undocumented_in(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in ast.walk(scope) if isinstance(scope, ast.Module) else scope.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        if isinstance(scope, ast.Module) and node not in scope.body:
            continue
        if not DESCRIBED_ELSEWHERE & set(_decorators(node)) and ast.get_docstring(node) is None:
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _undocumented_in(node, f"{prefix}{node.name}.")


def _decorators(node: Definition) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Attribute):
            yield decorator.attr
        elif isinstance(decorator, ast.Name):
            yield decorator.id


def listed_names(tree: ast.Module) -> list[str] | None:
    """Return the names in `__all__`, or None when the module has none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def bound_names(tree: ast.Module) -> set[str]:
    """Return the public names that a module's top level imports, defines or assigns."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def listing_faults(tree: ast.Module) -> Iterator[str]:
    """Say what is wrong with the `__all__` of a package's `__init__`."""
    bound, listed = bound_names(tree), listed_names(tree)
    if listed is None:
        if bound:
            yield f"has no __all__ for {', '.join(sorted(bound))}"
        return
    # Names may come by a module's __getattr__, so that import stays cheap.
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    if (missing := set(listed) - bound - {"__version__"}) and not lazy:
        yield f"lists {', '.join(sorted(missing))}, which it does not have"
    if len(set(listed)) != len(listed):
        yield "lists a name twice"


def test_every_public_name_of_the_library_has_a_docstring(library: list[Any]) -> None:
    faults = [f"{source.path}: {name}" for source in library for name in undocumented(source.tree)]
    assert not faults, "\n".join(faults)


def test_every_package_lists_its_public_names(library: list[Any]) -> None:
    faults = [
        f"{source.path} {fault}"
        for source in library
        if Path(source.path).name == "__init__.py"
        for fault in listing_faults(source.tree)
    ]
    assert not faults, "\n".join(faults)


def test_the_checker_finds_what_is_undocumented() -> None:
    source = (
        "class A:\n    def f(self): pass\n    def _g(self): pass\n    @f.setter\n    def f(self, x): pass\n"
        "async def h():\n    def inner(): pass\n"
        "def _private(): pass\n"
    )
    assert list(undocumented(ast.parse(source))) == ["the module", "A", "A.f", "h"]
    assert list(undocumented(ast.parse('"""Say."""\ndef f():\n    """Do."""\n'))) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from a import b\n", "has no __all__ for b"),
        ('from a import b\n__all__ = ["b", "c"]\n', "lists c, which it does not have"),
        ('from a import b\n__all__ = ["b", "b"]\n', "lists a name twice"),
    ],
)
def test_the_checker_finds_a_bad_listing(source: str, fault: str) -> None:
    assert list(listing_faults(ast.parse(source))) == [fault]


def test_the_checker_takes_a_good_listing() -> None:
    assert list(listing_faults(ast.parse('from a import b\n__all__ = ["b"]\n'))) == []
    assert list(listing_faults(ast.parse('"""Only a docstring."""\n'))) == []
