"""What `new-driver` makes, in a folder far from here, is found by the engine and passes the whole suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from mooncake_transfer.testing.compiling import compiled

NAME = "fabricx"
LIST_DRIVERS = (
    "from mooncake_transfer.drivers import probe_drivers\n"
    "print(*(status.name for status in probe_drivers() if status.usable))\n"
)
# Preloaded: no thread is to be had while the process says so.
NO_THREADS = """
#include <dlfcn.h>
#include <pthread.h>
#include <cerrno>
static volatile bool refused;
extern "C" void refuse_threads(bool value) { refused = value; }
extern "C" int pthread_create(pthread_t* id, const pthread_attr_t* how, void* (*body)(void*), void* given) {
  static auto* create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return refused ? EAGAIN : create(id, how, body, given);
}
"""
WITHOUT_THREADS = f"""
import ctypes
from mooncake_transfer import RailConfig, TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError

process = ctypes.CDLL(None)
config = TransferConfig(drivers=("{NAME}",), rails=RailConfig(attempts=1))
with TransferEngine(config) as owner, TransferEngine(config) as user:
    local, place = user.allocate(4096), user.import_region(owner.allocate(4096).descriptor())
    process.refuse_threads(True)
    try:
        user.write(local, place, [[0, 0, 4096]]).wait(20)
    except TransferError as error:
        print(type(error).__name__)
    process.refuse_threads(False)
    user.write(local, place, [[0, 0, 4096]]).wait(20)
    print("moved")
"""


class Driver(NamedTuple):
    """Where a new driver lies, and where it is installed."""

    folder: Path
    site: Path


@pytest.fixture(scope="module")
def script() -> Path:
    """The program behind `hatch run new-driver`."""
    return Path(__file__).resolve().parents[2] / "drivers" / "new_driver.py"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this Python, with additions to the environment."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture(scope="module")
def driver(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A new driver, far from here, and installed."""
    home = tmp_path_factory.mktemp("driver")
    folder, site = home / "far away", home / "site"
    made = run(script, NAME, "--into", folder)
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("hatch run") == 3
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    installed = run(*pip, "--target", site, folder)
    assert installed.returncode == 0, installed.stderr
    return Driver(folder, site)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_driver_is_found_and_passes_the_suite_without_a_change_to_the_engine(driver: Driver) -> None:
    folder, site = driver
    listed = run("-c", LIST_DRIVERS, PYTHONPATH=str(site))
    assert NAME in listed.stdout.split(), listed.stderr

    pytest_ = ("-m", "pytest", "-q", "-W", "error", "--import-mode=importlib", "--rootdir", folder)
    tested = run(*pytest_, folder / "tests", PYTHONPATH=str(site))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "passed" in tested.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_driver_outlives_a_time_without_threads(driver: Driver, tmp_path: Path) -> None:
    source = tmp_path / "no_threads.cpp"
    source.write_text(NO_THREADS)
    preloaded = compiled("no_threads.so", [source], "-O1", "-shared", "-ldl")
    done = run("-c", WITHOUT_THREADS, PYTHONPATH=str(driver.site), LD_PRELOAD=str(preloaded))
    assert (done.returncode, done.stdout.split()) == (0, ["PeerUnreachable", "moved"]), done.stderr


def test_nothing_is_left_of_the_name_of_the_template(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "driver"
    assert run(script, NAME, "--into", folder).returncode == 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert folder / "src" / f"mooncake_driver_{NAME}" / "plugin.py" in files
    assert folder / "abi" / "mooncake_driver.h" in files
    assert folder / "abi" / "support" / "table.hpp" in files
    written = [path for path in files if folder / "abi" not in path.parents]
    assert not [path for path in written if "template" in str(path.relative_to(folder)).lower()]
    assert not [path for path in written if "template" in path.read_text().lower()]
    assert "../.." not in (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["shm", "template", "Fabric", "my-fabric", "1fabric", "../x", ""])
def test_a_name_that_cannot_be_or_is_taken_is_refused(script: Path, tmp_path: Path, name: str) -> None:
    outcome = run(script, name, "--into", tmp_path / "driver")
    assert outcome.returncode == 2
    assert "name" in outcome.stderr
    assert not (tmp_path / "driver").exists()


def test_a_folder_with_something_in_it_is_left_alone(script: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    outcome = run(script, NAME, "--into", tmp_path)
    assert outcome.returncode == 2
    assert f"--into {tmp_path / f'mooncake-driver-{NAME}'}" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
