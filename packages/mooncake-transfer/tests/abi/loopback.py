"""Compiles loopback.c against the ABI header of some version, and offers it to engines as a driver."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_transfer.hooks import Available, DriverInfo, hookimpl
from mooncake_transfer.plugins import driver_plugins

HERE = Path(__file__).parent
CURRENT = HERE.parents[3] / "abi"
CAPSULE = b"mooncake.driver.v1"


def compile_driver(folder: Path, headers: Path, *defines: str) -> ctypes.CDLL:
    """Build loopback.c with a header's folder and macros, as a shared object with a state of its own."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler; install gcc")
    library = folder / "loopback.so"
    flags = [f"-D{define}" for define in defines]
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *flags]
    subprocess.run(
        [*command, f"-I{headers}", str(HERE / "loopback.c"), "-o", str(library), "-lpthread"],
        check=True,
        timeout=60,
    )
    return ctypes.CDLL(str(library))


def capsule_of(library: ctypes.CDLL) -> object:
    """Wrap the library's table as a driver's plugin does."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    table = ctypes.addressof(ctypes.c_char.in_dll(library, "loopback"))
    return new(table, CAPSULE, None)


class _Plugin:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @hookimpl
    def mooncake_transfer_drivers(self) -> list[DriverInfo]:
        def render(options: Any) -> dict[str, str]:
            return {name: str(value) for name, value in options.items()}

        return [
            DriverInfo(
                "loopback",
                frozenset({"dram"}),
                priority=1,
                probe=Available,
                load=lambda: capsule_of(self._library),
                options=render,
            )
        ]


@contextmanager
def offered(library: ctypes.CDLL) -> Iterator[None]:
    """The driver is installed meanwhile."""
    plugin = _Plugin(library)
    manager = driver_plugins().manager
    manager.register(plugin, name="loopback")
    try:
        yield
    finally:
        manager.unregister(plugin)
