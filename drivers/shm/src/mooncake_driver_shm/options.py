"""Options of the shm driver, as users write them under ``TransferConfig.driver_options["shm"]``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_transfer.driver_options import as_text, check_limits, checked

__all__ = ["ShmOptions", "render"]

# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "workers": (0, 64),
    "inline_bytes": (0, 1 << 40),
    "streaming_bytes": (0, 1 << 40),
    "chunk_bytes": (4096, 1 << 40),
    "queue_depth": (1, 1 << 20),
    "answer_timeout_s": (0.01, 3600),
}


class ShmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        workers: threads that copy beside the caller's; one operation may use all of them. 0: one for each
            core of this process but one, at least 1 and at most 8.
        inline_bytes: what is submitted at once and is no more than this, in total, is copied on the spot;
            0 leaves everything to the workers.
        streaming_bytes: batches from this size on are copied through the cache or past it, whichever the
            driver finds faster for their size; smaller ones always through it.
        chunk_bytes: larger operations are cut into pieces of up to this size: between two of them an
            operation can be cancelled, a region revoked, and another operation have its turn.
        queue_depth: how many operations may be under way or waiting to be fetched.
        answer_timeout_s: how long a peer may take to answer a greeting or the question for a region.
        allow_other_users: also serve peers that run as another user and hold the address and the key.
    """

    workers: int = 0
    inline_bytes: int = 1 << 20
    streaming_bytes: int = 1 << 20
    chunk_bytes: int = 2 << 20
    queue_depth: int = 4096
    answer_timeout_s: float = 5.0
    allow_other_users: bool = False

    def __post_init__(self) -> None:
        check_limits("shm", self, LIMITS)


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings that the compiled core reads. Raises ConfigError."""
    return as_text(checked("shm", ShmOptions, options))
