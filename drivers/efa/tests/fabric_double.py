"""Builds the double of libfabric in double/, once for each run of the tests, and sets it up."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from mooncake_transfer import TransferConfig

__all__ = ["CORE", "HERE", "compiler", "config_over_the_double", "double", "double_library"]

HERE = Path(__file__).parent
CORE = HERE.parent / "core"
ABI = next(path for path in (HERE.parent / "abi", HERE.parents[2] / "abi") if path.is_dir())
BUILD_S = 280


def compiler() -> list[str]:
    """The command of the C++ compiler, with what every program of the tests needs; skips without one."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler to build what the test needs; set CXX")
    return [*found.split(), "-std=c++20", "-O1", "-g", "-pthread", f"-I{CORE}", f"-I{ABI}"]


@functools.cache
def double_library() -> Path:
    """The double, built."""
    folder = tempfile.mkdtemp(prefix="mooncake-efa-double-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder, "libfabric-double.so")
    sources = map(str, sorted((HERE / "double").glob("*.cpp")))
    command = [*compiler(), "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(library), *sources]
    subprocess.run(command, check=True, timeout=BUILD_S)
    return library


def double() -> ctypes.CDLL:
    """The double as this process has it; skips the test where there is no compiler to build it."""
    return ctypes.CDLL(str(double_library()))


def config_over_the_double() -> TransferConfig:
    """Settings of an engine that has the driver, and the double in place of libfabric."""
    options = {"library": double()._name, "domain": "double0"}
    return TransferConfig(drivers=("efa",), driver_options={"efa": options})
