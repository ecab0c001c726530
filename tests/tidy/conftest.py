"""What the tidy tests look at: the files git knows or would add, and the distributions among them.

Each test file holds a checker, the test that runs it over the tree, and a test that it finds a planted fault.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CPP_SUFFIXES = frozenset({".cpp", ".hpp", ".h"})


@dataclass(frozen=True)
class Source:
    """One file of the tree; `path` is relative to the root, with forward slashes."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether it is a test or serves one, as opposed to code that is shipped."""
        return "tests" in Path(self.path).parts or Path(self.path).name == "conftest.py"

    @property
    def is_library(self) -> bool:
        """Whether it is shipped Python: under src/ of a distribution."""
        return self.path.endswith(".py") and "src" in Path(self.path).parts and not self.is_test

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed Python source."""
        return ast.parse(self.text, self.path)


@dataclass(frozen=True)
class Member:
    """One distribution: its folder, relative to the root, and its parsed pyproject.toml."""

    root: Path
    folder: str
    pyproject: dict[str, Any]

    @property
    def project(self) -> dict[str, Any]:
        """The [project] table."""
        table: dict[str, Any] = self.pyproject["project"]
        return table

    @property
    def import_name(self) -> str:
        """The one top-level package it ships."""
        name: str = self.project["name"].replace("-", "_")
        return name

    @property
    def is_compiled(self) -> bool:
        """Whether it has a C++ core."""
        return (self.root / self.folder / "CMakeLists.txt").is_file()

    def file(self, name: str) -> Path:
        """Return a path inside its folder."""
        return self.root / self.folder / name


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sources(root: Path) -> list[Source]:
    """Every text file that is tracked or would be added."""
    return list(_text_files(root))


@pytest.fixture(scope="session")
def python_sources(sources: list[Source]) -> list[Source]:
    """Every Python file, outside the template whose names are placeholders."""
    return [source for source in sources if source.path.endswith(".py") and "_template" not in source.path]


@pytest.fixture(scope="session")
def library(python_sources: list[Source]) -> list[Source]:
    """Every Python file that is shipped."""
    return [source for source in python_sources if source.is_library]


@pytest.fixture(scope="session")
def cpp_sources(sources: list[Source]) -> list[Source]:
    """Every C++ file and the C header of the driver ABI."""
    return [source for source in sources if Path(source.path).suffix in CPP_SUFFIXES]


@pytest.fixture(scope="session")
def members(root: Path) -> list[Member]:
    """Every distribution of the workspace."""
    files = sorted(
        file
        for part in ("packages", "drivers", "integration")
        for file in root.glob(f"{part}/*/pyproject.toml")
    )
    return [
        Member(root, str(file.parent.relative_to(root)), tomllib.loads(file.read_text()))
        for file in files
        if file.parent.name != "_template"
    ]


@pytest.fixture(scope="session")
def hatch(root: Path) -> dict[str, Any]:
    """The parsed hatch.toml."""
    return tomllib.loads((root / "hatch.toml").read_text())


def _text_files(root: Path) -> Iterator[Source]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=60).stdout.decode()
    for name in sorted(set(listed.split("\0")) - {""}):
        file = root / name
        if not file.is_file() or file.is_symlink():
            continue
        content = file.read_bytes()
        if b"\0" not in content:
            yield Source(name, content.decode())
