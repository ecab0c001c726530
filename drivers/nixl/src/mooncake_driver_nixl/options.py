"""Options of the nixl driver, as users write them under ``TransferConfig.driver_options["nixl"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from mooncake_transfer.driver_options import as_text, check_limits, checked

__all__ = ["NixlOptions", "render"]

# Inclusive.
LIMITS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "answer_timeout_s": (0.01, 3600),
    "max_op_bytes": (4096, 1 << 40),
    "active_transfers": (1, 1024),
}


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        host: one address to listen on for peers that ask for regions; without it, the engine's ``host``.
        port: port of that; 0 takes any free one.
        errors: UCX's error handling: ``none`` allows its shared-memory transports, ``peer`` makes it notice
            lost peers by itself, over networks.
        progress_thread: NIXL's own thread, which spins on a core; without it what peers cannot do alone
            advances while this engine looks, every millisecond when it has nothing else to do.
        answer_timeout_s: how long a peer may take to greet or to answer for a region.
        max_op_bytes: the engine cuts longer operations: how soon a cancel or a withdrawn region takes effect.
        active_transfers: how many of NIXL's transfers may be under way at a time.
    """

    host: str = "127.0.0.1"
    port: int = 0
    errors: Literal["none", "peer"] = "none"
    progress_thread: bool = False
    answer_timeout_s: float = 5.0
    max_op_bytes: int = 16 << 20
    active_transfers: int = 16

    def __post_init__(self) -> None:
        check_limits("nixl", self, LIMITS)


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into strings. Raises ConfigError."""
    return as_text(checked("nixl", NixlOptions, options))


def parse(options: Mapping[str, str]) -> NixlOptions:
    """Turn the strings of ``render`` into options again."""
    return msgspec.convert(dict(options), NixlOptions, strict=False)
