"""Commands write through one kind of console: rich's own puts pictures where addresses have ``:ab:``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

MADE_IN = "packages/mooncake-transfer/src/mooncake_transfer/console.py"
# They make a console of their own unless they are given one.
NEEDS_ONE = {"Progress", "Live", "Status"}
SHORTCUTS = {"print", "print_json", "get_console", "inspect"}


def foreign_consoles(tree: ast.Module) -> Iterator[int]:
    """Give the lines that make a console of rich, or use the one that it makes by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rich":
            if {alias.name for alias in node.names} & SHORTCUTS:
                yield node.lineno
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            given = any(keyword.arg == "console" for keyword in node.keywords)
            if name == "Console" or (name in NEEDS_ONE and not given and _is_of_rich(tree, name)):
                yield node.lineno


def _is_of_rich(tree: ast.Module, name: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("rich")
        and name in {alias.name for alias in node.names}
        for node in ast.walk(tree)
    )


def test_every_console_comes_from_one_place(library: list[Any]) -> None:
    elsewhere = [source for source in library if source.path != MADE_IN]
    places = [f"{source.path}:{line}" for source in elsewhere for line in foreign_consoles(source.tree)]
    assert not places, "use mooncake_transfer.console.plain_console:\n" + "\n".join(places)
    (home,) = [source for source in library if source.path == MADE_IN]
    assert len(list(foreign_consoles(home.tree))) == 1


def test_the_checker_finds_a_console_of_its_own() -> None:
    text = (
        "from rich import print\n"
        "from rich.progress import Progress\n"
        "Console(stderr=True)\n"
        "Progress()\n"
        "Progress(console=plain_console())\n"
        "rich.console.Console()\n"
    )
    assert sorted(foreign_consoles(ast.parse(text))) == [1, 3, 4, 6]
    assert not list(foreign_consoles(ast.parse("Progress()\nLive()\n")))
