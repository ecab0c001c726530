"""Builds the double of libfabric in double/, once for each run of the tests, and sets it up."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from mooncake_transfer import TransferConfig

__all__ = ["config_over_the_double", "double"]

SOURCES = Path(__file__).with_name("double")
BUILD_S = 100


@functools.cache
def _built() -> Path | None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    folder = tempfile.mkdtemp(prefix="mooncake-efa-double-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder, "libfabric-double.so")
    command = [compiler, "-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-I/opt/amazon/efa/include", "-o", str(library), *map(str, sorted(SOURCES.glob("*.cpp")))]
    subprocess.run(command, check=True, timeout=BUILD_S)
    return library


def double() -> ctypes.CDLL:
    """The double as this process has it; skips the test where there is no compiler to build it."""
    library = _built()
    if library is None:
        pytest.skip("no C++ compiler to build the double of libfabric with")
    return ctypes.CDLL(str(library))


def config_over_the_double() -> TransferConfig:
    """Settings of an engine that has the driver, and the double in place of libfabric."""
    options = {"library": double()._name, "domain": "double0"}
    return TransferConfig(drivers=("efa",), driver_options={"efa": options})
