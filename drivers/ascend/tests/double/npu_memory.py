"""Device memory of the double's NPUs: kinds of regions for the suite of all drivers, here and in peers."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import numpy.typing as npt

from mooncake_transfer.memory import MemoryRange

__all__ = [
    "HUGE_ONLY",
    "NORMAL_ONLY",
    "NpuMemory",
    "PinnedMemory",
    "acl",
    "control",
    "count",
    "huge",
    "land",
    "malloc",
    "pinned",
    "violation",
]

Bytes = npt.NDArray[np.uint8]
HUGE_ONLY, NORMAL_ONLY = 1, 2  # of aclrtMemMallocPolicy


@cache
def _library(folder: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(f"{folder}/libascendcl.so")
    loaded.acl_double_violation.restype = ctypes.c_char_p
    loaded.acl_double_count.restype = ctypes.c_long
    return loaded


@cache
def _hixl(folder: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(f"{folder}/libcann_hixl.so")
    loaded.hixl_double_land.restype = ctypes.c_long
    return loaded


def _folder() -> str:
    return os.environ["LD_LIBRARY_PATH"].partition(":")[0]


def acl() -> ctypes.CDLL:
    """The double of the runtime, with NPU 0 set in this thread."""
    found = _library(_folder())
    assert found.aclrtSetDevice(0) == 0
    return found


def violation() -> str:
    """A rule that was broken without an error; empty: none was."""
    return str(acl().acl_double_violation().decode())


@contextmanager
def control(name: str, value: int) -> Iterator[None]:
    """How calls of ACL and HIXL go on within the block: see ``acl_double_set``."""
    acl().acl_double_set(name.encode(), ctypes.c_long(value))
    try:
        yield
    finally:
        acl().acl_double_set(name.encode(), ctypes.c_long(0))


def count(what: str) -> int:
    """See ``acl_double_count``."""
    return int(acl().acl_double_count(what.encode()))


def land() -> int:
    """Have bytes arrive that are under way over links which have not ended; return how many pieces did."""
    return int(_hixl(_folder()).hixl_double_land())


class NpuMemory:
    """What the suite calls DeviceMemory."""

    def __init__(self, nbytes: int, policy: int, skip: int) -> None:
        library, address = acl(), ctypes.c_void_p()
        assert library.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes + skip), policy) == 0
        assert address.value
        self.address, self._nbytes = address.value + skip, nbytes
        self.source = MemoryRange(self.address, nbytes, owner=self, device=0)
        # Owners that tests do not clear end with the collector.
        self.close = weakref.finalize(self, library.aclrtFree, address)

    def whole(self) -> Bytes:
        """Its bytes as an array, which keeps it."""
        buffer = (ctypes.c_uint8 * self._nbytes).from_address(self.address)
        buffer.owner = self  # type: ignore[attr-defined]
        return np.frombuffer(buffer, np.uint8)

    def get(self) -> Bytes:
        return self.whole().copy()

    def set(self, array: Bytes) -> None:
        self.whole()[:] = array


def huge(nbytes: int) -> NpuMemory:
    """Of aclrtMalloc with HUGE_ONLY, which HCCS asks for; in the middle of its allocation, as tensors are."""
    return NpuMemory(nbytes, HUGE_ONLY, 512)


def malloc(nbytes: int) -> NpuMemory:
    """Of aclrtMalloc with NORMAL_ONLY: no multiple of 2 MiB."""
    return NpuMemory(nbytes, NORMAL_ONLY, 0)


class PinnedMemory(NpuMemory):
    """Main memory of aclrtMallocHost, which torch pins by it."""

    def __init__(self, nbytes: int) -> None:
        library, address = acl(), ctypes.c_void_p()
        assert library.aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
        assert address.value
        self.address, self._nbytes = address.value, nbytes
        self.source = MemoryRange(self.address, nbytes, owner=self)
        self.close = weakref.finalize(self, library.aclrtFreeHost, address)


def pinned(nbytes: int) -> PinnedMemory:
    """Main memory that HIXL may register."""
    return PinnedMemory(nbytes)
