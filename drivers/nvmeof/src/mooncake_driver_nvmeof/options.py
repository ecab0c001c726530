"""Options of the nvmeof driver, as users write them under ``TransferConfig.driver_options["nvmeof"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from mooncake_transfer.driver_options import as_text, check_limits, checked

__all__ = ["NvmeofOptions", "render"]

# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "in_flight": (1, 1 << 15),
    "chunk_bytes": (4096, 1 << 30),
    "workers": (1, 256),
    "queue_depth": (1, 1 << 15),
}


class NvmeofOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        io: how files are read and written: ``io_uring``, ``threads``, or ``auto``, which takes threads where
            the kernel or a container forbids io_uring.
        direct: past the page cache (O_DIRECT), where the file system does that.
        durable: a write is complete when its bytes are on the medium, not in a cache (RWF_DSYNC).
        polled: completions of direct I/O are polled for, which takes the processor and saves interrupts; for
            drives with poll queues.
        register_buffers: memory is pinned when it is first used, up to 64 MiB at a time, so that the kernel
            need not find its pages for every operation.
        in_flight: how many operations the engine keeps under way with one peer.
        chunk_bytes: the largest operation; longer blocks are cut.
        workers: most threads, for I/O that is not aligned and where there is no io_uring.
        queue_depth: how many operations may be under way or waiting to be fetched, over all peers.
    """

    io: Literal["auto", "io_uring", "threads"] = "auto"
    direct: bool = True
    durable: bool = False
    polled: bool = False
    register_buffers: bool = True
    in_flight: int = 64
    chunk_bytes: int = 1 << 20
    workers: int = 8
    queue_depth: int = 1024

    def __post_init__(self) -> None:
        check_limits("nvmeof", self, LIMITS)


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check the user's options and write them as the strings that the core reads."""
    return as_text(checked("nvmeof", NvmeofOptions, options))
