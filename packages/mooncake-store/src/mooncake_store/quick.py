"""The usual get and put of one value, by compiled code; and going on with what was not usual."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from mooncake_store._core import Quick
from mooncake_store.config import StoreConfig
from mooncake_store.keys import object_prefix
from mooncake_store.protocol.express import EXPRESS_METHOD
from mooncake_transfer import TransferEngine

__all__ = ["Handed", "Quick", "Stage", "open_quick"]


class Stage(enum.IntEnum):
    """How far compiled code has come with a call; Stage in core/quick.hpp."""

    OTHER_WAY = 1
    NOT_ASKED = 2
    ANSWERED = 3
    NOT_MOVED = 4
    MOVED = 5
    MISSING = 6
    DONE = 7


class Handed(NamedTuple):
    """A call that compiled code began and has not ended.

    Attributes:
        stage: OTHER_WAY: the master did nothing and wants to be asked the other way. NOT_ASKED: a question
            was not answered. ANSWERED: the first one was. NOT_MOVED: the bytes did not move, or not all.
            MOVED: they did, and what ends the call is left. MISSING: there is no such value. DONE: the master
            has committed, and ``committed`` is left to be looked at.
        connection, epoch: to and of the master that was asked.
        answer: its first answer, as it came.
        committed: its answer to the commit.
        segment: to or from which the bytes (did not) move.
        asked_s: when it was asked, of the lease clock.
        began_s: the same, of the monotonic clock.
        late_s: by how much it took longer to move than the bytes may.
        failure: why it was not answered, or nothing has moved.
    """

    stage: int
    connection: int
    epoch: int
    answer: bytes
    committed: bytes
    segment: int
    asked_s: float
    began_s: float
    late_s: float
    failure: BaseException | None


def open_quick(engine: TransferEngine, config: StoreConfig, wake: Callable[[], None]) -> Quick | None:
    """None where bytes that have moved are to be compared, and values have no checksums to do it by.

    ``wake``: called when the master is to be told of a lease that has ended, and nobody is about to.
    """
    if engine.config.integrity != "off" and not config.checksums:
        return None
    calls: Any = engine.compiled_calls()
    return Quick(
        calls,
        EXPRESS_METHOD,
        object_prefix(config.tenant),
        wake,
        config.call_timeout_s,
        config.transfer_timeout_s,
        config.checksums,
    )
