"""Puts: reserve, move, commit, for a whole batch at a time."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_store import protocol
from mooncake_store._errors import RoomNumbers, StoreError
from mooncake_store.batch import Batch
from mooncake_store.config import StoreConfig
from mooncake_store.membership import Membership
from mooncake_store.mover import Layout, LocalMemory, Moved, Mover, Uints
from mooncake_store.notices import Notices
from mooncake_store.protocol import IfExists, Outcome

__all__ = ["PutResult", "Values", "Writer"]

MOVE_ATTEMPTS = 3
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.1
# A write must have ended before the master may give its memory away; this much earlier by this client's
# clock.
DEADLINE_MARGIN = 0.9
UNDONE = (Outcome.FAILED, Outcome.LOST)

log = logging.getLogger(__name__)


class Values(NamedTuple):
    """What is to be stored: for each key of the batch, ``sizes`` bytes at ``offsets`` of ``memory``."""

    batch: Batch
    memory: LocalMemory
    offsets: Uints
    sizes: Uints


@dataclass(slots=True)
class PutResult:
    """What became of a batch.

    Attributes:
        outcomes: of each key: STORED, EXISTS, FULL, FAILED or LOST.
        room: the store's room when something was FULL.
        reason: why something FAILED or was LOST.
    """

    outcomes: list[Outcome]
    room: RoomNumbers = (0, 0, 0, 0, 0)
    reason: str = ""


class Writer:
    """Stores batches for one client. Thread-safe."""

    def __init__(
        self,
        membership: Membership,
        mover: Mover,
        notices: Notices,
        config: StoreConfig,
        closing: threading.Event,
    ) -> None:
        self.membership = membership
        self.mover = mover
        self.notices = notices
        self.config = config
        self.closing = closing

    def put(self, values: Values, if_exists: IfExists) -> PutResult:
        """Store every value that can be; see :class:`PutResult`. Raises MasterError, StoreClosed."""
        return _Put(self, values, if_exists).run()


class _Put:
    """One batch on its way into the store."""

    def __init__(self, writer: Writer, values: Values, if_exists: IfExists) -> None:
        self._writer = writer
        self._values = values
        self._if_exists: IfExists = if_exists
        self._result = PutResult([Outcome.FULL] * len(values.batch))
        self._avoid: set[int] = set()

    def run(self) -> PutResult:
        """Try until everything is decided: again elsewhere after a failure, later when room may come."""
        outcomes = self._result.outcomes
        wait_until_s = time.monotonic() + self._writer.config.put_wait_s
        pause_s, attempts = FIRST_PAUSE_S, 0
        todo = list(range(len(outcomes)))
        while todo:
            may_come = self._round(np.array(todo, dtype=np.intp)) and time.monotonic() < wait_until_s
            failed = [i for i in todo if outcomes[i] in UNDONE]
            full = [i for i in todo if outcomes[i] is Outcome.FULL]
            attempts += bool(failed)
            todo = sorted((failed if attempts < MOVE_ATTEMPTS else []) + (full if may_come else []))
            if todo and not failed:
                # Somebody reads what would have to go. Nobody tells when that ends, so look again.
                self._writer.closing.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self._result

    def _round(self, todo: npt.NDArray[np.intp]) -> bool:
        """Try the keys at the positions ``todo`` once; whether waiting may help those that found no room."""
        batch, result = self._values.batch, self._result
        asked_s = time.monotonic()
        request = protocol.Reserve(
            digests=batch.digests[todo].tobytes(),
            keys=[batch.keys[i] for i in todo.tolist()],
            sizes=self._values.sizes[todo].astype("<u8").tobytes(),
            if_exists=self._if_exists,
            avoid=sorted(self._avoid),
        )
        reserved = self._writer.membership.ask(request, protocol.Reserved)
        outcomes = [Outcome(outcome) for outcome in reserved.outcomes]
        placed = [at for at, outcome in enumerate(outcomes) if outcome is Outcome.PLACED]
        if placed:
            deadline_s = asked_s + DEADLINE_MARGIN * self._writer.membership.reservation_ttl_s
            layout = Layout(reserved.placement, self._values.offsets[todo], request.epoch)
            moved = self._move(layout, deadline_s, reserved.reservation, len(placed))
            failed = [number for number, at in enumerate(placed) if at in moved.failed]
            committed = self._commit(reserved.reservation, layout.epoch, failed, len(placed))
            for at, outcome in zip(placed, committed, strict=True):
                outcomes[at] = outcome
            self._avoid |= moved.segments
            lost = "the reservation or its segment was lost before the commit"
            result.reason = moved.reason or lost
        for position, outcome in zip(todo.tolist(), outcomes, strict=True):
            # No room anywhere else: the failure before is what the caller has to know.
            if outcome is not Outcome.FULL or result.outcomes[position] not in UNDONE:
                result.outcomes[position] = outcome
        result.room = reserved.room or result.room
        return reserved.wait

    def _move(self, layout: Layout, deadline_s: float, reservation: int, count: int) -> Moved:
        try:
            return self._writer.mover.write(self._values.memory, layout, deadline_s)
        except BaseException:
            try:
                self._commit(reservation, layout.epoch, list(range(count)), count)
            except StoreError as error:
                log.debug("a reservation was not revoked, it will expire: %s", error)
            raise

    def _commit(self, reservation: int, epoch: int, failed: list[int], count: int) -> list[Outcome]:
        notices = self._writer.notices
        request = protocol.Commit(
            reservation=reservation, failed=failed, if_exists=self._if_exists, notices_seen=notices.seen
        )
        committed = self._writer.membership.conclude(request, epoch, protocol.Committed)
        if committed is None:
            return [Outcome.LOST] * count
        notices.accept(epoch, committed.notices)
        # What left the segment before this commit is told before the put returns, so that news of a key's
        # old bytes never comes after its new ones are known.
        notices.flush(self._writer.config.notice_wait_s)
        return [Outcome(outcome) for outcome in committed.outcomes] or [Outcome.LOST] * count
