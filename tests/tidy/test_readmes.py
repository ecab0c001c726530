"""What the pages say can be run, runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mooncake_transfer.cli import build_app

CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"(?:\./dev|hatch run) ([a-z][\w-]*(?:[.:][\w-]+)*)")
COMMAND = re.compile(r"(?:^|`)(?:hatch run |\./dev )?mooncake ((?:[a-z]+(?: |`|$))+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
# Words that are no script of ours but what `hatch run` can run in the environment.
PROGRAMS = {"python", "pip", "pytest", "mypy", "ruff", "mooncake"}


def pages(root: Path, members: list[Any]) -> list[Path]:
    """Return the pages a newcomer reads."""
    return [root / "README.md", root / "CONTRIBUTING.md", *(member.file("README.md") for member in members)]


def unknown_scripts(text: str, hatch: dict[str, Any]) -> list[str]:
    """Return the `./dev X` and `hatch run X` of a text that hatch.toml does not have."""
    known = set(hatch["envs"]["default"]["scripts"]) | PROGRAMS
    for environment, table in hatch["envs"].items():
        drivers = [driver for matrix in table.get("matrix", []) for driver in matrix["driver"]]
        names = [f"{environment}.{driver}" for driver in drivers] or [environment]
        known |= {f"{name}:{script}" for name in names for script in table.get("scripts", {})}
    return [script for script in SCRIPT.findall(text) if script not in known]


def commands_named(text: str) -> set[tuple[str, ...]]:
    """Return the subcommands of `mooncake` that a text names."""
    return {tuple(words.replace("`", " ").split()) for words in COMMAND.findall(text)}


def run_block(block: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a program of its own, with warnings as errors."""
    program = folder / "example.py"
    program.write_text(block)
    command = [sys.executable, "-W", "error", str(program)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=180)


def test_every_distribution_shows_an_example(members: list[Any]) -> None:
    silent = [member.folder for member in members if "```" not in member.file("README.md").read_text()]
    assert not silent


def test_the_page_of_a_new_driver_begins_with_what_contributing_asks_of_it(root: Path) -> None:
    text = (root / "drivers" / "_template" / "README.md").read_text()
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"Hardware", "Build and test", "Options", "Promises", "What was run where"} <= set(sections)


@pytest.mark.timeout(1200)  # some dozens of programs, one after another
def test_every_python_example_runs(root: Path, members: list[Any], tmp_path: Path) -> None:
    faults = []
    for page in pages(root, members):
        for number, block in enumerate(CODE.findall(page.read_text()), 1):
            outcome = run_block(block, tmp_path)
            if outcome.returncode:
                faults.append(f"{page.relative_to(root)}, example {number}:\n{block}\n{outcome.stderr}")
    assert not faults, "\n".join(faults)


def test_every_script_on_a_page_exists(root: Path, members: list[Any], hatch: dict[str, Any]) -> None:
    faults = [
        f"{page.relative_to(root)}: {script}"
        for page in pages(root, members)
        for script in unknown_scripts(page.read_text(), hatch)
    ]
    assert not faults, "\n".join(faults)


def test_every_command_on_a_page_exists(root: Path, members: list[Any]) -> None:
    commands = {words for page in pages(root, members) for words in commands_named(page.read_text())}
    app = build_app()
    faults = []
    for words in sorted(commands):
        outcome = CliRunner().invoke(app, [*words, "--help"])
        if outcome.exit_code:
            faults.append(f"mooncake {' '.join(words)}: {outcome.output}")
    assert commands
    assert not faults, "\n".join(faults)


def test_every_link_to_a_file_leads_somewhere(root: Path, members: list[Any]) -> None:
    faults = [
        f"{page.relative_to(root)}: {target}"
        for page in pages(root, members)
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`./dev demo --json F` and `hatch run store:test`", []),
        ("`./dev dance`", ["dance"]),
        ("`hatch run driver.tcp:test`, `hatch run driver.smoke:test`", ["driver.smoke:test"]),
        ("hatch run store:sing", ["store:sing"]),
    ],
)
def test_the_checker_finds_a_script_that_does_not_exist(
    text: str, unknown: list[str], hatch: dict[str, Any]
) -> None:
    assert unknown_scripts(text, hatch) == unknown


def test_the_commands_of_a_text_are_found() -> None:
    text = "Call `mooncake store master --port 0`, or\nmooncake doctor\nA mooncake is round."
    assert commands_named(text) == {("store", "master"), ("doctor",)}


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    assert run_block("assert 1 == 2\n", tmp_path).returncode != 0
    assert run_block("import warnings\nwarnings.warn('old', DeprecationWarning)\n", tmp_path).returncode != 0
    assert run_block("assert 1 == 1\n", tmp_path).returncode == 0
