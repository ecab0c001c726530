"""Every hatch environment declares the packages that the tests it runs import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PREFIX = "mooncake_"
# Written by the tests themselves: a double of a package, and a module that tells where a library was built.
WRITTEN_BY_TESTS = {"pyverbs", "verbs_double_library"}


def imports(tree: ast.Module) -> Iterator[str]:
    """Give the top-level name of every module that is imported, wherever; `importorskip` is none of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def foreign(trees: Iterable[ast.Module], local: set[str]) -> set[str]:
    """Return the imported modules that are neither Python's, nor ours, nor in the folder of the tests."""
    found = {name for tree in trees for name in imports(tree)}
    return {
        name
        for name in found - local - WRITTEN_BY_TESTS
        if name not in sys.stdlib_module_names and not name.startswith(PREFIX)
    }


def declared(requirements: Iterable[str]) -> set[str]:
    """Return the normal names of the distributions that are asked for."""
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def undeclared(modules: set[str], distributions: set[str], homes: dict[str, list[str]]) -> Iterator[str]:
    """Name the modules that come with none of the distributions; ``homes``: who ships each module."""
    for module in sorted(modules):
        if not distributions & {canonicalize_name(home) for home in homes.get(module, [])}:
            yield module


def environments(hatch: dict[str, Any]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Give each environment's name, requirements and member folders, with templates and matrices applied."""
    for name, env in hatch["envs"].items():
        template = hatch["envs"].get(env.get("template", ""), {})
        requirements = [*template.get("dependencies", []), *env.get("dependencies", [])]
        requirements += env.get("extra-dependencies", [])
        folders = env.get("workspace", {}).get("members", [])
        for driver in env.get("matrix", [{}])[0].get("driver", [""]):
            filled = [folder.replace("{matrix:driver}", driver) for folder in folders]
            yield f"{name}.{driver}".rstrip("."), requirements, filled


def members_tested(name: str, folders: list[str]) -> list[str]:
    """Return the members whose tests an environment runs: all in `default`, else the one it is named for."""
    short = name.removeprefix("driver.")
    return [
        folder
        for folder in folders
        if name == "default" or folder.split("/")[-1] in {short, f"mooncake-{short}"}
    ]


def test_every_environment_declares_what_its_tests_import(
    hatch: dict[str, Any], members: list[Any], python_sources: list[Any]
) -> None:
    homes = packages_distributions()
    by_folder = {member.folder: member for member in members}
    faults, looked_at = [], set()
    for name, requirements, folders in environments(hatch):
        own = [text for folder in folders for text in by_folder[folder].project.get("dependencies", [])]
        for folder in members_tested(name, folders):
            sources = [source for source in python_sources if source.path.startswith(f"{folder}/tests/")]
            local = {part.removesuffix(".py") for source in sources for part in Path(source.path).parts}
            modules = foreign((source.tree for source in sources), local)
            looked_at.add(folder)
            faults += [
                f"{name}: the tests of {folder} import {module}, which it does not declare"
                for module in undeclared(modules, declared([*requirements, *own]), homes)
            ]
    assert not faults, "\n".join(faults)
    assert looked_at == set(by_folder)


def test_the_checker_finds_a_module_that_is_not_declared() -> None:
    tree = ast.parse(
        "import ssl, trustme\nfrom yaml import load\nimport mooncake_store, table\nfrom . import x\n"
    )
    modules = foreign([tree], {"table"})
    assert modules == {"trustme", "yaml"}
    homes = {"trustme": ["trustme"], "yaml": ["PyYAML"]}
    assert list(undeclared(modules, declared(["pyyaml>=6", "pytest"]), homes)) == ["trustme"]


@pytest.mark.parametrize(
    ("name", "folder"), [("driver.tcp", "drivers/tcp"), ("store", "packages/mooncake-store")]
)
def test_an_environment_tests_the_member_it_is_named_for(name: str, folder: str) -> None:
    assert members_tested(name, ["packages/mooncake-transfer", folder, "drivers/shm"]) == [folder]


def test_an_environment_has_what_its_template_has_and_one_for_each_of_its_matrix() -> None:
    envs = {
        "base": {"dependencies": ["pytest"]},
        "driver": {
            "template": "base",
            "extra-dependencies": ["trustme"],
            "matrix": [{"driver": ["tcp", "shm"]}],
            "workspace": {"members": ["drivers/{matrix:driver}"]},
        },
    }
    assert list(environments({"envs": envs}))[1:] == [
        ("driver.tcp", ["pytest", "trustme"], ["drivers/tcp"]),
        ("driver.shm", ["pytest", "trustme"], ["drivers/shm"]),
    ]
