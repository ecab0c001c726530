"""NUMA placement by the kernel's own calls: binding a range to a node, and asking where pages lie."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

from mooncake_transfer._errors import ConfigError, MemoryUnavailable

__all__ = ["bind_to_node", "free_bytes_of_node", "node_of", "nodes_with_memory"]

NODES = Path("/sys/devices/system/node")
MPOL_BIND = 2  # linux/mempolicy.h
MPOL_MF_MOVE = 2  # pages that are there already move too
SAMPLES = 16  # pages that node_of asks about

# Numbers of mbind(2) and move_pages(2); libc has no wrapper for them.
SYSCALLS = {"x86_64": (237, 279), "aarch64": (235, 239), "riscv64": (235, 239), "ppc64le": (259, 301)}

_libc = ctypes.CDLL(None, use_errno=True)


def nodes_with_memory() -> list[int]:
    """Return the nodes that have memory, far nodes without CPUs among them. ``[0]`` without NUMA support."""
    try:
        return parse_list((NODES / "has_memory").read_text())
    except OSError:  # a kernel without NUMA has no such file, and one node
        return [0]


def parse_list(text: str) -> list[int]:
    """Parse the kernel's list format, such as ``0-3,8``. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def free_bytes_of_node(node: int) -> int:
    """Return what can still be taken on ``node``: free pages and those of the page cache."""
    try:
        text = (NODES / f"node{node}" / "meminfo").read_text()
    except OSError as error:
        raise MemoryUnavailable(f"cannot ask what is free on NUMA node {node}: {error}") from error
    fields = {line.split()[2].rstrip(":"): int(line.split()[3]) * 1024 for line in text.splitlines()}
    return sum(fields.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))


def check_node(node: int) -> None:
    """Raise ConfigError unless ``node`` is one with memory."""
    known = nodes_with_memory()
    if node not in known:
        raise ConfigError(
            f"NUMA node {node} has no memory here; nodes with memory: {', '.join(map(str, known))}"
        )


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Let the pages of a mapping come from ``node`` only, those already there included.

    ``address`` is page aligned. For shared memory the rule belongs to the memory, not to the mapping: it
    holds for pages that a peer touches first. Raises ConfigError for a node without memory,
    MemoryUnavailable when the kernel forbids it.
    """
    check_node(node)
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << (node % 64)
    # The kernel reads one bit less than it is told.
    failed = _libc.syscall(
        _syscall(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(MPOL_BIND),
        mask,
        ctypes.c_ulong(words * 64 + 1),
        ctypes.c_uint(MPOL_MF_MOVE),
    )
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryUnavailable(
            f"cannot bind {nbytes} bytes to NUMA node {node}: mbind: {reason}; "
            "in a container, allow mbind in its seccomp profile and the node in its cpuset"
        )


def node_of(address: int, nbytes: int) -> int:
    """Return the node that holds a range, by a sample of its pages.

    -1 when none of them is backed yet, when they lie on several nodes, or when the kernel does not tell.
    """
    known = nodes_with_memory()
    if len(known) == 1:
        return known[0]
    first = address - address % mmap.PAGESIZE
    pages = (address + nbytes - 1 - first) // mmap.PAGESIZE + 1
    count = min(SAMPLES, pages)
    places = [first + index * (pages - 1) // max(1, count - 1) * mmap.PAGESIZE for index in range(count)]
    status = (ctypes.c_int * count)()
    try:
        number = _syscall(1)
    except MemoryUnavailable:
        return -1
    failed = _libc.syscall(
        number,
        ctypes.c_int(0),
        ctypes.c_ulong(count),
        (ctypes.c_void_p * count)(*places),
        None,
        status,
        ctypes.c_int(0),
    )
    # Negative: no page yet (ENOENT), or a page of zeros that every node shares (EFAULT).
    found = {node for node in status if node >= 0}
    return found.pop() if not failed and len(found) == 1 else -1


def _syscall(index: int) -> int:
    machine = platform.machine()
    if machine not in SYSCALLS:
        raise MemoryUnavailable(f"NUMA calls on {machine!r} are not known; leave numa_node unset")
    return SYSCALLS[machine][index]
