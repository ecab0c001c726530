"""`./dev` and what it calls behave as the README says, also where something is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MAX_LINES = 84
HEADERS = (Path("/usr/include/rdma/fabric.h"), Path("/usr/include/infiniband/verbs.h"))


def run_dev(root: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run ./dev, with `path` in place of PATH when given."""
    environment = os.environ if path is None else {"PATH": path}
    command = ["/bin/sh", str(root / "dev"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def bare_checkout(root: Path, tmp_path: Path) -> Path:
    """A folder with ./dev and no .hatch/, so that nothing was installed by an earlier call."""
    shutil.copy(root / "dev", tmp_path)
    return tmp_path


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH without Python, compiler, CMake and git, of a user who is not root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("dirname", "sh"):
        (folder / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    identity = folder / "id"
    identity.write_text("#!/bin/sh\necho 1000\n")
    identity.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def rebuild(root: Path) -> ModuleType:
    """The script that reinstalls stale members."""
    spec = importlib.util.spec_from_file_location("rebuild_if_stale", root / ".ci" / "rebuild_if_stale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dev_is_short_and_posix(root: Path) -> None:
    text = (root / "dev").read_text()
    assert text.startswith("#!/bin/sh\n")
    assert text.count("\n") <= MAX_LINES
    assert os.access(root / "dev", os.X_OK)
    subprocess.run(["/bin/sh", "-n", str(root / "dev")], check=True, timeout=10)


def test_dev_without_arguments_says_how_to_use_it(root: Path) -> None:
    outcome = run_dev(root)
    assert outcome.returncode == 2
    assert "usage: ./dev demo" in outcome.stderr


def test_dev_prints_the_line_that_installs_what_is_missing(bare_checkout: Path, bare_path: Path) -> None:
    outcome = run_dev(bare_checkout, "test", path=str(bare_path))
    assert outcome.returncode == 1
    assert "missing: Python>=3.10 with venv and headers, a C++20 compiler" in outcome.stderr
    line = "sudo apt-get update && sudo apt-get install -y python3 python3-venv python3-dev g++ cmake git"
    assert line in outcome.stderr
    assert not (bare_checkout / ".hatch").exists()


def test_an_old_compiler_and_an_old_python_count_as_missing(bare_checkout: Path, bare_path: Path) -> None:
    for tool in ("python3", "c++"):
        (bare_path / tool).write_text("#!/bin/sh\nexit 1\n")
        (bare_path / tool).chmod(0o755)
    for tool in ("cmake", "git"):
        (bare_path / tool).symlink_to("/bin/true")
    outcome = run_dev(bare_checkout, "test", path=str(bare_path))
    assert outcome.returncode == 1
    assert (
        "missing: Python>=3.10 with venv and headers, a C++20 compiler (g++>=11 or clang++>=14)."
        in outcome.stderr
    )


@pytest.mark.parametrize(("task", "asks"), [("test", True), ("driver.verbs:test", True), ("lint", False)])
def test_tasks_that_test_ask_for_the_servers_they_start(
    bare_checkout: Path, bare_path: Path, task: str, asks: bool
) -> None:
    for tool in ("python3", "c++", "cmake", "git"):
        (bare_path / tool).symlink_to("/bin/true")
    hint = "some tests are skipped: sudo apt-get install -y etcd-server redis-server"
    assert (hint in run_dev(bare_checkout, task, path=str(bare_path)).stderr) is asks
    for server in ("etcd", "redis-server"):
        (bare_path / server).symlink_to("/bin/true")
    lacks_headers = not all(header.exists() for header in HEADERS)
    assert (hint in run_dev(bare_checkout, task, path=str(bare_path)).stderr) is (asks and lacks_headers)


def test_headers_without_which_tests_of_a_driver_are_skipped_are_installed_for_it(root: Path) -> None:
    text = (root / "dev").read_text()
    extras = re.search(r'^extras="([^"]*)"', text, re.MULTILINE)
    tasks = re.search(r"^case \$1 in (.*:test)\)$", text, re.MULTILINE)
    assert extras
    assert tasks
    found = {
        (folder.parent.name, package)
        for folder in (root / "drivers").glob("[!_]*/tests")
        for file in folder.glob("test_*.py")
        for package in re.findall(r"not here; install (lib[\w-]+-dev)", file.read_text())
    }
    assert {driver for driver, _ in found} >= {"efa", "verbs"}
    for driver, package in found:
        assert package in extras[1].split(), f"tests of {driver} are skipped without {package}"
        assert f"*{driver}:test" in tasks[1].split(" | "), f"./dev driver.{driver}:test installs no {package}"


def test_every_installed_member_is_watched_for_changes(
    rebuild: ModuleType, root: Path, members: list[Any]
) -> None:
    watched = [str(folder.relative_to(root)) for folder in rebuild.members()]
    assert watched == sorted(member.folder for member in members)


@pytest.mark.parametrize("changed", ["pyproject.toml", "CMakeLists.txt", "core/deep/engine.cpp"])
def test_a_change_of_what_a_member_is_built_from_is_noticed(
    rebuild: ModuleType, tmp_path: Path, changed: str
) -> None:
    for name in ("pyproject.toml", "CMakeLists.txt", "core/deep/engine.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    later = rebuild.changed_at(tmp_path) + 100
    os.utime(tmp_path / changed, (later, later))
    assert rebuild.changed_at(tmp_path) == later


def test_a_change_of_the_driver_abi_makes_compiled_members_stale_only(
    rebuild: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").touch()
    os.utime(tmp_path / "pyproject.toml", (1, 1))
    assert rebuild.changed_at(tmp_path) == 1
    (tmp_path / "CMakeLists.txt").touch()
    os.utime(tmp_path / "CMakeLists.txt", (1, 1))
    assert rebuild.changed_at(tmp_path) == max(
        file.stat().st_mtime for file in (rebuild.ROOT / "abi").rglob("*") if file.is_file()
    )
