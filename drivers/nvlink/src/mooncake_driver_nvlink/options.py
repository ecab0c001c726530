"""Options of the nvlink driver, as users write them under ``TransferConfig.driver_options["nvlink"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from mooncake_transfer.driver_options import as_text, check_limits, checked

__all__ = ["NvlinkOptions", "render"]

# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "streams": (1, 32),
    "queue_depth": (1, 1 << 20),
    "in_flight_bytes": (1 << 20, 1 << 40),
    "answer_timeout_s": (0.01, 3600),
}


class NvlinkOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        library: path of the CUDA driver library; empty: ``libcuda.so.1``, as the loader finds it.
        streams: how many streams of each GPU copy at the same time.
        queue_depth: how many operations may be under way or waiting to be fetched.
        in_flight_bytes: how much the engine keeps in flight on one connection. What a GPU was given cannot
            be taken back, so this is also how late a cancel or a revoked key takes effect.
        answer_timeout_s: how long a peer may take to answer a greeting or the question for a region.
        allow_other_users: also serve processes of other users that hold address and key.
        main_memory: also take main memory, which is pinned for that.
        host: numeric address where peers of other hosts connect to; used only with fabric handles.
        fabric: whether peers of other hosts are served, through fabric handles. ``auto``: when every GPU of
            this process has them.
    """

    library: str = ""
    streams: int = 4
    queue_depth: int = 4096
    in_flight_bytes: int = 256 << 20
    answer_timeout_s: float = 5.0
    allow_other_users: bool = False
    main_memory: bool = True
    host: str = "127.0.0.1"
    fabric: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        check_limits("nvlink", self, LIMITS)


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings that the compiled core reads. Raises ConfigError."""
    return as_text(checked("nvlink", NvlinkOptions, options))
