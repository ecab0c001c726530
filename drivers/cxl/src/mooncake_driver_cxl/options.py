"""Options of the cxl driver, as users write them under ``TransferConfig.driver_options["cxl"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from mooncake_transfer.driver_options import as_text, check_limits, checked

__all__ = ["CxlOptions", "render"]

# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "size_bytes": (0, 1 << 50),
    "numa_node": (-1, 1023),
    "host": (0, 15),
    "hosts": (1, 16),
    "lease_s": (0.2, 8),
    "workers": (0, 64),
    "inline_bytes": (0, 1 << 50),
    "streaming_bytes": (0, 1 << 50),
    "chunk_bytes": (4096, 1 << 50),
    "queue_depth": (1, 1 << 20),
}


class CxlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        path: the pool: a DAX device (``/dev/dax0.0``), or a file on pmem, hugetlbfs or tmpfs. Empty: the
            driver is not used.
        create: make a pool of a file that is missing or empty, or of a device whose first page is zero.
        size_bytes: how large to make a file that is missing or empty; 0: the file or device tells.
        numa_node: bind a file's memory to this NUMA node, such as that of CXL memory; -1: do not.
        host: number of this machine among those that map the pool, from 0. Each must have its own.
        hosts: how many shares a pool gets that is made here: one for each machine.
        coherent: whether the hardware keeps the caches of those machines alike. ``auto``: within a machine it
            does, between machines it does not. ``false``: everything is flushed, as for data that shall
            survive a loss of power.
        lease_s: how long a machine may give no sign before its processes count as dead. A process of this
            machine that ends is seen at once.
        workers: threads that copy beside the caller's; 0: one for each core of this process but one, at
            least 1 and at most 8.
        inline_bytes: what is submitted at once and is no more than this, in total, is copied on the spot;
            0 leaves everything to the workers.
        streaming_bytes: operations from this size on are copied past the cache, where the processor can.
        chunk_bytes: larger operations are cut into pieces of this size: between two of them an operation can
            be cancelled, a region revoked, and another operation have its turn.
        queue_depth: how many operations may be under way or waiting to be fetched.
    """

    path: str = ""
    create: bool = False
    size_bytes: int = 0
    numa_node: int = -1
    host: int = 0
    hosts: int = 1
    coherent: Literal["auto", "true", "false"] = "auto"
    lease_s: float = 4.0
    workers: int = 0
    inline_bytes: int = 1 << 20
    streaming_bytes: int = 1 << 20
    chunk_bytes: int = 256 << 10
    queue_depth: int = 4096

    def __post_init__(self) -> None:
        check_limits("cxl", self, LIMITS)


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings that the compiled core reads. Raises ConfigError."""
    return as_text(checked("cxl", CxlOptions, options))
