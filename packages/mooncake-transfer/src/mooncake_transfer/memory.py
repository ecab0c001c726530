"""Where a region's bytes live: shareable memory of the engine, or memory the user brings."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_transfer._errors import ConfigError, MemoryUnavailable

MADV_POPULATE_WRITE = 23  # linux/mman.h; not in Python's mmap module

__all__ = ["Memory", "allocate_shareable", "available_bytes", "wrap"]


@dataclass(slots=True)
class Memory:
    """A range of this process's memory. ``owner`` keeps it alive; ``fd`` is -1 when it cannot be shared."""

    address: int
    nbytes: int
    owner: object
    fd: int = -1

    def close(self) -> None:
        """Give back the descriptor. The bytes live on as long as a view of them does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def available_bytes() -> int:
    """Memory this process may still take: what the system has left, within its control group."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
    except OSError:  # no unified hierarchy, or the root group: no limit of its own
        return available
    return available if limit.strip() == "max" else min(available, max(0, int(limit) - int(used)))


def allocate_shareable(nbytes: int, name: str, *, prefault: bool = False) -> Memory:
    """Allocate zeroed memory that other processes can map, without any file that could be left behind.

    With ``prefault`` the system backs every page now, so that no first touch is slow or finds no memory left.
    Raises ConfigError for a size that is not positive, MemoryUnavailable when the machine has less.
    """
    if nbytes <= 0:
        raise ConfigError(f"cannot allocate {nbytes} bytes for region {name!r}; the size must be positive")
    available = available_bytes()
    if nbytes > available:
        raise MemoryUnavailable(
            f"region {name!r} needs {nbytes} bytes ({nbytes / 2**30:.1f} GiB), "
            f"{available} ({available / 2**30:.1f} GiB) are available; ask for less or free memory"
        )
    fd = os.memfd_create(f"mooncake-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A peer that mapped it must never meet a hole: the size is fixed for good.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = mmap.mmap(fd, nbytes)
        if prefault:
            _back_with_pages(mapping)
    except (OSError, OverflowError, ValueError) as error:
        os.close(fd)
        raise MemoryUnavailable(f"cannot map {nbytes} bytes for region {name!r}: {error}") from error
    return Memory(np.frombuffer(mapping, dtype=np.uint8).ctypes.data, nbytes, mapping, fd)


def _back_with_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14 does not know this advice
            raise
        np.frombuffer(mapping, dtype=np.uint8)[:: mmap.PAGESIZE] = 0


def wrap(memory: object) -> Memory:
    """Describe memory the user brings: a tensor with ``data_ptr()``, or a writable, contiguous buffer.

    Raises ConfigError when it has no such memory, is empty, read-only, not contiguous or not in CPU memory.
    """
    if hasattr(memory, "data_ptr"):
        return _wrap_tensor(memory)
    try:
        view = memoryview(memory)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"cannot register {type(memory).__name__}: it exposes no buffer; pass a tensor or an array"
        ) from error
    if view.readonly or not view.c_contiguous or view.nbytes == 0:
        problem = "read-only" if view.readonly else "empty" if view.nbytes == 0 else "not contiguous"
        raise ConfigError(f"cannot register {type(memory).__name__} of {view.nbytes} bytes: it is {problem}")
    flat = np.frombuffer(view, dtype=np.uint8)
    return Memory(flat.ctypes.data, view.nbytes, flat)


def _wrap_tensor(tensor: object) -> Memory:
    device = str(getattr(tensor, "device", "cpu"))
    nbytes = int(getattr(tensor, "nbytes"))  # noqa: B009 - a duck-typed tensor: torch is no dependency here
    contiguous = getattr(tensor, "is_contiguous", lambda: True)()
    if device != "cpu":
        raise ConfigError(
            f"cannot register a tensor on {device!r}: no driver for device memory is part of this release"
        )
    if not contiguous or nbytes == 0:
        raise ConfigError(f"cannot register a tensor of {nbytes} bytes: it must be contiguous and not empty")
    return Memory(int(getattr(tensor, "data_ptr")()), nbytes, tensor)  # noqa: B009
