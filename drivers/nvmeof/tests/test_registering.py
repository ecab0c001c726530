"""Registering files and memory, through the driver's C table."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mooncake_driver_nvmeof._core import driver
from mooncake_transfer.testing.compiling import compiled

HERE = Path(__file__).parent
ABI = next(path for path in (HERE.parent / "abi", HERE.parents[2] / "abi") if path.is_dir())
NBYTES = 256 << 20  # long enough under way


def test_a_registration_that_fails_leaves_nothing_that_peers_could_reach(tmp_path: Path) -> None:
    library = ctypes.CDLL(
        str(compiled("registering.so", [HERE / "registering.cpp"], "-O1", "-shared", include=(ABI,)))
    )
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    library.check_registering.restype = ctypes.c_char_p
    library.check_registering.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]
    paths = [tmp_path / "busy", tmp_path / "other"]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(NBYTES)
    names = [bytes(path) for path in paths]
    assert library.check_registering(pointer(driver(), b"mooncake.driver.v1"), *names, NBYTES) == b""
