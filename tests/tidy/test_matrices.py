"""What lists members by hand lists all of them: hatch environments, scripts and the CI workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOW = ".github/workflows/ci.yml"


def short_name(member: Any) -> str:
    """Return the name of a member's environment and CI job: the distribution without its prefix."""
    name: str = member.project["name"]
    return name.removeprefix("mooncake-").removeprefix("driver-")


def drivers_of(members: list[Any]) -> list[str]:
    """Return the short names of the drivers."""
    return sorted(short_name(member) for member in members if member.folder.startswith("drivers/"))


def packages_of(members: list[Any]) -> list[str]:
    """Return the short names of everything that is no driver."""
    return sorted(short_name(member) for member in members if not member.folder.startswith("drivers/"))


@pytest.fixture(scope="module")
def jobs(root: Path) -> dict[str, Any]:
    """The jobs of the CI workflow."""
    table: dict[str, Any] = yaml.safe_load((root / WORKFLOW).read_text())["jobs"]
    return table


def script_of(line: str) -> str:
    """Return the hatch script, `script` or `environment:script`, that a step of the workflow runs."""
    before, program, arguments = line.partition("./dev ")
    plain_or_root = not before or before.startswith("sudo --preserve-env=")
    known = bool(program) and plain_or_root
    assert known, f"a step runs {line!r}, which is no script of hatch.toml"
    return arguments.split(" -")[0]


def test_the_workspace_holds_every_member(hatch: dict[str, Any], members: list[Any]) -> None:
    assert sorted(hatch["envs"]["default"]["workspace"]["members"]) == sorted(
        member.folder for member in members
    )


def test_every_driver_has_an_environment(hatch: dict[str, Any], members: list[Any]) -> None:
    (matrix,) = hatch["envs"]["driver"]["matrix"]
    assert sorted(matrix["driver"]) == drivers_of(members)


def test_every_package_has_an_environment_with_itself(hatch: dict[str, Any], members: list[Any]) -> None:
    for member in members:
        if member.folder.startswith("drivers/"):
            continue
        environment = hatch["envs"][short_name(member)]
        assert member.folder in environment["workspace"]["members"]
        assert environment["scripts"]["test"] == ["fresh", f"pytest {member.folder}/tests {{args}}"]
        assert environment["scripts"]["types"] == f"mypy {member.folder}/src"


def test_types_and_stubs_go_over_every_member(hatch: dict[str, Any], members: list[Any]) -> None:
    scripts = hatch["envs"]["default"]["scripts"]
    program, *folders = scripts["types"].split()
    assert program == "mypy"
    assert sorted(folders) == sorted(f"{member.folder}/src" for member in members)
    for member in members:
        target = f"{member.folder}/src/{member.import_name}"
        assert any(line.endswith(target) for line in scripts["stubs"]) == member.is_compiled


def test_ci_has_one_job_per_package_and_driver(jobs: dict[str, Any], members: list[Any]) -> None:
    assert sorted(jobs["package"]["strategy"]["matrix"]["package"]) == packages_of(members)
    assert sorted(jobs["driver"]["strategy"]["matrix"]["driver"]) == drivers_of(members)


def test_ci_calls_scripts_that_a_person_can_call(jobs: dict[str, Any], hatch: dict[str, Any]) -> None:
    called = {script_of(step["run"]) for job in jobs.values() for step in job["steps"] if "run" in step}
    per_member = {
        f"{member}:{script}"
        for member in ("${{ matrix.package }}", "driver.${{ matrix.driver }}")
        for script in ("test", "types")
    }
    elsewhere = {
        f"{name}:{script}" for name, env in hatch["envs"].items() for script in env.get("scripts", {})
    }
    assert called <= set(hatch["envs"]["default"]["scripts"]) | per_member | elsewhere
    assert called >= {"lint", "types", "test", "build", "rebuild-sdists", "wheels"} | per_member


def test_the_script_of_a_step_is_found() -> None:
    assert script_of("./dev demo --json FILE") == "demo"
    assert script_of("sudo --preserve-env=CI ./dev faults -rs") == "faults"
    assert script_of("./dev driver.${{ matrix.driver }}:test") == "driver.${{ matrix.driver }}:test"
    with pytest.raises(AssertionError, match="no script"):
        script_of("pytest packages")
