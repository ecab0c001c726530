"""What a driver is told about memory: kind, place, size, and the descriptor behind it."""

from __future__ import annotations

import enum
import os
import weakref
from dataclasses import dataclass

__all__ = ["HOST", "Memory", "MemoryKind", "is_contiguous"]

HOST = -1
"""The ``device`` of memory that no accelerator owns."""


class MemoryKind(enum.IntEnum):
    """Where bytes live; the values are those of ``mc_memory_kind`` in the driver ABI."""

    DRAM = 0
    CUDA = 1
    FILE = 2
    BLOCK = 3


@dataclass
class Memory:
    """A range of bytes that a region can be made of.

    Attributes:
        address: its first byte in this process (also for GPU memory); 0 for files and block devices.
        nbytes: its size in bytes.
        owner: the object that keeps it alive.
        fd: descriptor behind it, -1 when there is none to share. This object owns it: ``close()`` closes it,
            and so does its own end.
        fd_offset: where it begins in ``fd``, in bytes.
        kind: what it is.
        device: ordinal of the accelerator that holds it, ``HOST`` for everything else.
        numa_node: the NUMA node it lies on or is bound to; -1 when unknown, or on several.
        writable: whether peers may be allowed to write to it.
        location: URL of a block device that drivers reach by themselves; it has no descriptor then.
    """

    address: int
    nbytes: int
    owner: object
    fd: int = -1
    fd_offset: int = 0
    kind: MemoryKind = MemoryKind.DRAM
    device: int = HOST
    numa_node: int = -1
    writable: bool = True
    location: str = ""

    def __post_init__(self) -> None:
        # For engines that are dropped and not closed; drivers have descriptors of their own.
        self._descriptor = weakref.finalize(self, os.close, self.fd) if self.fd >= 0 else None
        if self._descriptor is not None:
            self._descriptor.atexit = False  # the system closes it; threads of drivers may still copy

    def close(self) -> None:
        """Give back the descriptor. The bytes live on as long as a view of them does."""
        self.fd = -1
        if self._descriptor is not None:
            self._descriptor()


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> bool:
    """Whether an array fills its range without gaps, last index fastest; None strides say that it does."""
    if strides is None:
        return True
    expected = item
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
