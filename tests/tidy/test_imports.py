"""Packages import downwards and only what is public; the contracts stand in the root's pyproject.toml."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "mooncake_"


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Name everything of ours that is imported, down to the imported name: `a.b` for `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith(PREFIX))


def private_imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Name the imports that reach into a private module or name of another package."""
    for name in imported_modules(tree):
        top, *rest = name.split(".")
        if top != package and any(part.startswith("_") for part in rest):
            yield name


def imports_of_testing(tree: ast.Module) -> Iterator[str]:
    """Name the imports of a `testing` subpackage."""
    return (name for name in imported_modules(tree) if "testing" in name.split("."))


def package_of(path: str) -> str:
    """Return the top-level package that a file under src/ belongs to."""
    parts = Path(path).parts
    return parts[parts.index("src") + 1]


def lint_imports(config: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run import-linter with the given contracts; packages are also looked for in `path`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo", str(config)]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, env=environment, cwd=config.parent, capture_output=True, text=True, check=False, timeout=60
    )


def test_layers_import_only_downwards(root: Path) -> None:
    outcome = lint_imports(root / "pyproject.toml")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_package_is_under_the_contracts(root: Path, members: list[Any]) -> None:
    linter = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert sorted(linter["root_packages"]) == sorted(member.import_name for member in members)
    contracts = {contract["name"]: contract for contract in linter["contracts"]}
    drivers = sorted(member.import_name for member in members if member.folder.startswith("drivers/"))
    others = sorted(member.import_name for member in members if not member.folder.startswith("drivers/"))
    assert sorted(contracts["no package imports a driver"]["source_modules"]) == others
    assert sorted(contracts["no package imports a driver"]["forbidden_modules"]) == drivers
    engine_only = contracts["a driver knows the transfer engine and nothing above it"]
    assert sorted(engine_only["source_modules"]) == drivers
    assert sorted([*engine_only["forbidden_modules"], "mooncake_transfer"]) == others
    assert sorted(contracts["drivers do not know each other"]["modules"]) == drivers


def test_private_modules_stay_in_their_package(library: list[Any]) -> None:
    faults = [
        f"{source.path} imports {name}"
        for source in library
        for name in private_imports(source.tree, package_of(source.path))
    ]
    assert not faults, "\n".join(faults)


def test_library_code_does_not_import_test_doubles(library: list[Any]) -> None:
    faults = [
        f"{source.path} imports {name}"
        for source in library
        if "testing" not in Path(source.path).parts
        for name in imports_of_testing(source.tree)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("importer", "imported", "contract"),
    [
        ("mooncake_transfer", "mooncake_store", "integration -> conductor"),
        ("mooncake_ep", "mooncake_store", "integration -> conductor"),
        ("mooncake_conductor", "mooncake_transformers", "integration -> conductor"),
        ("mooncake_store", "mooncake_driver_tcp", "no package imports a driver"),
        ("mooncake_driver_tcp", "mooncake_store", "a driver knows the transfer engine"),
        ("mooncake_driver_tcp", "mooncake_driver_shm", "drivers do not know each other"),
    ],
)
def test_the_contracts_break_on_an_upward_import(
    root: Path, tmp_path: Path, importer: str, imported: str, contract: str
) -> None:
    # Other names than ours, because an installed package would be found before one in tmp_path.
    config = tmp_path / "pyproject.toml"
    config.write_text((root / "pyproject.toml").read_text().replace(PREFIX, "sample_"))
    importer, imported = importer.replace(PREFIX, "sample_"), imported.replace(PREFIX, "sample_")
    for package in tomllib.loads(config.read_text())["tool"]["importlinter"]["root_packages"]:
        (tmp_path / package).mkdir()
        body = f"import {imported}\n" if package == importer else ""
        (tmp_path / package / "__init__.py").write_text(body)
    outcome = lint_imports(config, path=str(tmp_path))
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    broken = [line for line in outcome.stdout.splitlines() if line.endswith("BROKEN")]
    assert [line for line in broken if line.startswith(contract)], outcome.stdout


def test_the_checker_finds_private_and_imports_of_testing() -> None:
    tree = ast.parse(
        "from mooncake_transfer._core import x\n"
        "from mooncake_transfer import _errors, engine\n"
        "import mooncake_store.testing.clock\n"
        "from mooncake_store._layout import y\n"
        "def f():\n    from mooncake_transfer.testing import DriverConformance\n"
    )
    assert list(private_imports(tree, "mooncake_store")) == [
        "mooncake_transfer._core.x",
        "mooncake_transfer._errors",
    ]
    assert list(imports_of_testing(tree)) == [
        "mooncake_store.testing.clock",
        "mooncake_transfer.testing.DriverConformance",
    ]
