"""Every distribution has what a distribution needs, and every driver the shape of the template."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

FRAGMENT = re.compile(r"^(\d+|\+[\w-]+)\.(feature|bugfix|doc|removal|misc)\.md$")
METADATA = {"license": "Apache-2.0", "readme": "README.md", "requires-python": ">=3.10"}
DRIVER_FILES = ("src/{module}/plugin.py", "src/{module}/options.py", "tests/test_conformance.py")
CORE_FILES = ("CMakeLists.txt", "core", "src/{module}/_core.pyi")


def has_core(member: Any) -> bool:
    """Whether its build compiles something; drivers in plain Python are built by hatchling alone."""
    requires = member.pyproject.get("build-system", {}).get("requires", [])
    return [Requirement(text).name for text in requires] != ["hatchling"]


def missing_parts(member: Any) -> Iterator[str]:
    """Say what a distribution lacks of the files and metadata that each must have."""
    module = member.import_name
    files = ["README.md", "CHANGELOG.md", "news", "tests"]
    files += [f"src/{module}/__init__.py", f"src/{module}/py.typed"]
    if member.folder.startswith("drivers/"):
        names = DRIVER_FILES + CORE_FILES if has_core(member) else DRIVER_FILES
        files += [name.format(module=module) for name in names]
    yield from (f"no {name}" for name in files if not member.file(name).exists())
    project = member.project
    for key, expected in METADATA.items():
        if project.get(key) != expected:
            yield f"[project] {key} is {project.get(key)!r}, not {expected!r}"
    if not re.fullmatch(r"\d+\.\d+\.\d+", project.get("version", "")):
        yield "[project] version is not fixed as MAJOR.MINOR.PATCH"
    towncrier = member.pyproject.get("tool", {}).get("towncrier", {})
    if (towncrier.get("directory"), towncrier.get("filename")) != ("news", "CHANGELOG.md"):
        yield "[tool.towncrier] does not turn news/ into CHANGELOG.md"


def bad_fragments(names: list[str]) -> list[str]:
    """Return the files of a news folder that towncrier would not take."""
    return [name for name in names if name != ".gitkeep" and not FRAGMENT.match(name)]


def bad_ranges(member: Any, versions: dict[str, str]) -> Iterator[str]:
    """Say which requirements on siblings have no upper end, or one that shuts out the sibling beside it."""
    extras = member.project.get("optional-dependencies", {}).values()
    for text in [*member.project.get("dependencies", []), *(one for extra in extras for one in extra)]:
        requirement = Requirement(text)
        version = versions.get(requirement.name)
        if version is None:
            continue
        if not any(part.operator in {"<", "~=", "=="} for part in requirement.specifier):
            yield f"{text} has no upper end"
        if not requirement.specifier.contains(version):
            yield f"{text} shuts out {version}"


def test_every_distribution_is_complete(members: list[Any]) -> None:
    faults = [f"{member.folder}: {fault}" for member in members for fault in missing_parts(member)]
    assert not faults, "\n".join(faults)


def test_every_driver_is_named_for_its_folder(members: list[Any]) -> None:
    for member in members:
        where, name = member.folder.split("/")
        expected = {"drivers": f"mooncake-driver-{name}", "packages": name, "integration": f"mooncake-{name}"}
        assert member.project["name"] == expected[where]


def test_every_driver_has_the_shape_of_the_template(root: Path, members: list[Any]) -> None:
    template = root / "drivers" / "_template"
    assert template.is_dir()
    shipped = {file.suffix for file in template.rglob("*") if file.is_file()}
    assert {".toml", ".md", ".py", ".cpp"} <= shipped
    kinds = {file.relative_to(template).parts[0] for file in template.rglob("*") if file.is_file()}
    for member in members:
        if member.folder.startswith("drivers/"):
            asked = kinds if has_core(member) else kinds - set(CORE_FILES)
            lacking = sorted(kind for kind in asked if not member.file(kind).exists())
            assert not lacking, f"{member.folder} lacks {lacking} of the template"


def test_news_fragments_have_names_that_towncrier_takes(members: list[Any]) -> None:
    faults = [
        f"{member.folder}/news/{name}"
        for member in members
        for name in bad_fragments([file.name for file in member.file("news").iterdir()])
    ]
    assert not faults, "\n".join(faults)


def test_siblings_are_required_in_ranges_that_hold_them(members: list[Any]) -> None:
    versions = {member.project["name"]: member.project["version"] for member in members}
    faults = [f"{member.folder}: {fault}" for member in members for fault in bad_ranges(member, versions)]
    assert not faults, "\n".join(faults)


def test_what_is_installed_is_what_stands_here(members: list[Any]) -> None:
    for member in members:
        installed = importlib.metadata.distribution(member.project["name"])
        assert installed.version == member.project["version"], member.folder
        declared = {
            (group, name, value)
            for group, entries in member.project.get("entry-points", {}).items()
            for name, value in entries.items()
        }
        declared |= {("console_scripts", *script) for script in member.project.get("scripts", {}).items()}
        assert {(entry.group, entry.name, entry.value) for entry in installed.entry_points} == declared


def test_every_entry_point_loads(members: list[Any]) -> None:
    for member in members:
        for entry in importlib.metadata.distribution(member.project["name"]).entry_points:
            assert entry.load() is not None


def test_committed_stubs_are_those_of_the_compiled_modules(members: list[Any], tmp_path: Path) -> None:
    compiled = [member for member in members if member.is_compiled]
    assert compiled
    for member in compiled:
        stubs = sorted(member.file("src").rglob("_*.pyi"))
        assert member.file(f"src/{member.import_name}/_core.pyi") in stubs
        for stub in stubs:
            module = ".".join(stub.relative_to(member.file("src")).with_suffix("").parts)
            fresh = tmp_path / f"{module}.pyi"
            command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", module, "-o", str(fresh)]
            subprocess.run(command, check=True, timeout=60)
            assert stub.read_text() == fresh.read_text(), f"run `hatch run stubs` and commit {member.folder}"


def test_the_checker_finds_an_incomplete_distribution(members: list[Any], tmp_path: Path) -> None:
    ours = members[0]
    bare = type(ours)(tmp_path, "drivers/x", {"project": {"name": "mooncake-driver-x", "version": "1"}})
    faults = list(missing_parts(bare))
    assert "no src/mooncake_driver_x/py.typed" in faults
    assert "no tests/test_conformance.py" in faults
    assert "no CMakeLists.txt" in faults
    assert "[project] license is None, not 'Apache-2.0'" in faults
    assert "[project] version is not fixed as MAJOR.MINOR.PATCH" in faults
    assert "[tool.towncrier] does not turn news/ into CHANGELOG.md" in faults


def test_the_checker_finds_fragments_towncrier_would_not_take() -> None:
    good = [".gitkeep", "12.feature.md", "+first.feature.md"]
    assert bad_fragments([*good, "first.md", "12.news.md"]) == ["first.md", "12.news.md"]


@pytest.mark.parametrize(
    ("requirement", "fault"),
    [
        ("mooncake-store>=0.1", "mooncake-store>=0.1 has no upper end"),
        ("mooncake-store>=0.1,<0.2", "mooncake-store>=0.1,<0.2 shuts out 0.2.0"),
    ],
)
def test_the_checker_finds_a_range_that_does_not_hold_the_sibling(
    members: list[Any], tmp_path: Path, requirement: str, fault: str
) -> None:
    member = type(members[0])(tmp_path, "packages/a", {"project": {"dependencies": [requirement, "numpy"]}})
    assert list(bad_ranges(member, {"mooncake-store": "0.2.0"})) == [fault]
