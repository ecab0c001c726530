"""Memory of GPUs of the double: kinds of regions for the suite of all drivers, here and in peers."""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_transfer.memory import MemoryRange

__all__ = [
    "Gpu",
    "GpuMemory",
    "Stream",
    "fabric",
    "gpu",
    "malloc",
    "managed",
    "mapped",
    "mapped_whole",
    "part",
]

Bytes = npt.NDArray[np.uint8]
GRANULARITY = 2 << 20
POSIX_FD, FABRIC = 1, 8
PTR = ctypes.c_uint64
SEGMENT_BYTES = 16 << 20
_parts = itertools.count()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Gpu:
    """The double as a program uses CUDA: device 0, its primary context, allocations."""

    def __init__(self, library: Path) -> None:
        self.cuda = ctypes.CDLL(str(library))
        self.cuda.cuda_double_bytes.restype = ctypes.c_void_p
        self.cuda.cuda_double_count.restype = ctypes.c_uint64
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of CUDA; it must succeed."""
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name}: CUDA error {code}"

    def within(self, name: str, *arguments: object) -> None:
        """Call a function of CUDA with the context current."""
        self.call("cuCtxPushCurrent_v2", self.context)
        try:
            self.call(name, *arguments)
        finally:
            self.call("cuCtxPopCurrent_v2", None)

    def view(self, address: int, nbytes: int, owner: object) -> Bytes:
        """GPU memory as an array, which keeps ``owner``."""
        where = self.cuda.cuda_double_bytes(PTR(address))
        assert where
        buffer = (ctypes.c_uint8 * nbytes).from_address(where)
        buffer.owner = owner  # type: ignore[attr-defined]
        return np.frombuffer(buffer, np.uint8)

    def count(self, what: str) -> int:
        """How many there are now: copies, batches, mappings, streams, events, imports, closing."""
        names = ("copies", "batches", "mappings", "streams", "events", "imports", "closing")
        return int(self.cuda.cuda_double_count(names.index(what)))

    @contextmanager
    def control(self, name: str, value: int) -> Iterator[None]:
        """How calls go on within the block: see ``cuda_double_set``."""
        self.cuda.cuda_double_set(name.encode(), value)
        try:
            yield
        finally:
            self.cuda.cuda_double_set(name.encode(), 0)

    def violation(self) -> str:
        """A rule that was broken without CUDA noticing; empty: none was."""
        words = ctypes.create_string_buffer(200)
        self.cuda.cuda_double_violations(words, ctypes.c_size_t(200))
        return words.value.decode()

    def malloc(self, nbytes: int) -> tuple[list[tuple[int, int]], Callable[[], None]]:
        """Allocate by cuMemAlloc."""
        address = PTR()
        self.within("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return [(address.value, nbytes)], lambda: self.within("cuMemFree_v2", address)

    def managed(self, nbytes: int) -> tuple[list[tuple[int, int]], Callable[[], None]]:
        """Allocate by cuMemAllocManaged."""
        address = PTR()
        self.within("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(nbytes), 1)
        return [(address.value, nbytes)], lambda: self.within("cuMemFree_v2", address)

    def map(self, sizes: list[int], types: int) -> tuple[list[tuple[int, int]], Callable[[], None]]:
        """Map allocations of these sizes, multiples of the granularity, one after the other."""
        about = _Properties(type=1, handle_types=types, location=_Location(1, 0))
        base, total = PTR(), ctypes.c_size_t(sum(sizes))
        self.call("cuMemAddressReserve", ctypes.byref(base), total, ctypes.c_size_t(0), PTR(0), PTR(0))
        parts, at = [], base.value
        for size in sizes:
            handle = PTR()
            self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(about), PTR(0))
            self.call("cuMemMap", PTR(at), ctypes.c_size_t(size), ctypes.c_size_t(0), handle, PTR(0))
            self.call("cuMemRelease", handle)
            parts.append((at, size))
            at += size
        access = _Access(_Location(1, 0), 3)
        self.call("cuMemSetAccess", base, total, ctypes.byref(access), ctypes.c_size_t(1))

        def free() -> None:
            self.call("cuMemUnmap", base, total)
            self.call("cuMemAddressFree", base, total)

        return parts, free


@cache
def gpu(folder: str = "") -> Gpu:
    """The double that processes find now."""
    return Gpu(Path(folder or os.environ["LD_LIBRARY_PATH"].partition(":")[0]) / "libcuda.so.1")


class Stream:
    """A user's stream, which can be held up."""

    def __init__(self, device: Gpu) -> None:
        self._device = device
        self.handle = ctypes.c_void_p()
        device.within("cuStreamCreate", ctypes.byref(self.handle), 1)
        self._callbacks: list[Any] = []

    def then(self, function: Any) -> None:
        """Have a function called when the work before it is done; work after it waits."""
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())
        self._callbacks.append(callback)
        self._device.call("cuLaunchHostFunc", self.handle, callback, None)

    def close(self) -> None:
        self._device.within("cuStreamDestroy_v2", self.handle)


class GpuMemory:
    """What the suite calls DeviceMemory."""

    def __init__(
        self, device: Gpu, nbytes: int, made: tuple[list[tuple[int, int]], Callable[[], None]], skip: int = 0
    ) -> None:
        self._gpu, self._nbytes = device, nbytes
        self._parts, free = made
        self._skip = skip
        self.source = MemoryRange(self._parts[0][0] + skip, nbytes, owner=self, device=0)
        # Owners that tests do not clear end with the collector.
        self.close = weakref.finalize(self, free)

    def whole(self) -> Bytes:
        """It as one array; only for memory of one allocation."""
        ((address, _),) = self._parts
        return self._gpu.view(address + self._skip, self._nbytes, self)

    def get(self) -> Bytes:
        pieces = [self._gpu.view(address, size, None).copy() for address, size in self._parts]
        return np.concatenate(pieces)[self._skip : self._skip + self._nbytes]

    def set(self, array: Bytes) -> None:
        at = -self._skip
        for address, size in self._parts:
            begin, end = max(at, 0), min(at + size, len(array))
            if begin < end:
                self._gpu.view(address + begin - at, end - begin, None)[:] = array[begin:end]
            at += size


def malloc(nbytes: int) -> GpuMemory:
    """Of cuMemAlloc, not at the beginning of its allocation: it is in the middle, as tensors of torch are."""
    device = gpu(os.environ["LD_LIBRARY_PATH"].partition(":")[0])
    return GpuMemory(device, nbytes, device.malloc(nbytes + 512), skip=512)


@cache
def _segment(folder: str) -> tuple[list[tuple[int, int]], Callable[[], None]]:
    return gpu(folder).malloc(SEGMENT_BYTES)


def part(nbytes: int) -> GpuMemory:
    """One after the other of one allocation that stays, as tensors of one segment of torch are."""
    folder = os.environ["LD_LIBRARY_PATH"].partition(":")[0]
    ((base, _),), _ = _segment(folder)
    begin = base + nbytes * next(_parts)
    return GpuMemory(gpu(folder), nbytes, ([(begin, nbytes)], lambda: None))


def managed(nbytes: int) -> GpuMemory:
    """Of cuMemAllocManaged, which no process can hand to another one."""
    device = gpu(os.environ["LD_LIBRARY_PATH"].partition(":")[0])
    return GpuMemory(device, nbytes, device.managed(nbytes))


def _mapped(nbytes: int, types: int, whole: bool) -> GpuMemory:
    device = gpu(os.environ["LD_LIBRARY_PATH"].partition(":")[0])
    units = -(-(nbytes + 512) // GRANULARITY)
    sizes = [units * GRANULARITY] if whole or units == 1 else [GRANULARITY, (units - 1) * GRANULARITY]
    return GpuMemory(device, nbytes, device.map(sizes, types), skip=512)


def mapped(nbytes: int) -> GpuMemory:
    """Of virtual memory management, of two allocations when it is large enough; exported by descriptors."""
    return _mapped(nbytes, POSIX_FD, whole=False)


def mapped_whole(nbytes: int) -> GpuMemory:
    """The same, of one allocation."""
    return _mapped(nbytes, POSIX_FD, whole=True)


def fabric(nbytes: int) -> GpuMemory:
    """Of virtual memory management, exported by fabric handles."""
    return _mapped(nbytes, FABRIC, whole=False)
