"""What a cluster tells its owner while it starts, runs and stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

__all__ = ["OnProgress", "PartState", "Progress", "ignore_progress"]

PartState = Literal["starting", "ready", "died", "stopping", "stopped"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One step in the life of one process of the cluster.

    Attributes:
        part: the process's name, for example ``"decode-0"``.
        state: what has just become of it.
        detail: its URL when ready, the reason when it died, else empty.
    """

    part: str
    state: PartState
    detail: str = ""


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """An ``OnProgress`` for callers that do not care."""
