"""Puts: reserve, move, commit, for a whole batch at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_store import protocol
from mooncake_store._errors import ProtocolMismatch, RoomNumbers, StoreError
from mooncake_store.batch import Batch
from mooncake_store.checksums import sums_of
from mooncake_store.config import StoreConfig
from mooncake_store.membership import Membership
from mooncake_store.mover import Layout, LocalMemory, Moved, Mover
from mooncake_store.notices import Notices
from mooncake_store.parts import WRITTEN, Uints, as_parts, sizes_and_places
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import IfExists, Outcome, Placement
from mooncake_store.protocol.express import express_reply
from mooncake_store.protocol.objects import STRIPES_SINCE_MINOR
from mooncake_store.quick import Handed, Stage
from mooncake_store.time_budget import TimeBudget

__all__ = ["PutResult", "Source", "Values", "Writer", "values_of"]

MOVE_ATTEMPTS = 3
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.1
# A write must have ended before the master may give its memory away; this much earlier by this client's
# clock.
DEADLINE_MARGIN = 0.9
# As plain numbers: those of an enumeration take long to make and to compare.
PLACED, EXISTS, FULL, STORED = map(int, (Outcome.PLACED, Outcome.EXISTS, Outcome.FULL, Outcome.STORED))
LOST, FAILED, QUOTA = map(int, (Outcome.LOST, Outcome.FAILED, Outcome.QUOTA))
UNDONE = (FAILED, LOST)

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Memory that values come from: whole ones at ``offsets``, one of each, or ``parts`` (see parts.READ)."""

    memory: LocalMemory
    offsets: Uints
    parts: Uints | None = None

    def layout(self, placement: Placement, todo: list[int], count: int, epoch: int) -> Layout:
        """Where what is here of the values at the positions ``todo``, of ``count``, goes.

        The placement numbers just those.
        """
        if self.parts is None:
            return Layout(placement, self.offsets if len(todo) == count else self.offsets[todo], epoch)
        number = np.full(count, -1)
        number[todo] = np.arange(len(todo))
        mine = number[self.parts[:, 0].astype(np.intp)]
        parts = self.parts[mine >= 0]
        parts[:, 0] = mine[mine >= 0]
        return Layout.of_parts(placement, parts, epoch)


class Values(NamedTuple):
    """What is to be stored: for each key of the batch, ``sizes`` bytes, which come from ``sources``."""

    batch: Batch
    sizes: Uints
    sources: Sequence[Source]
    policy: PutPolicy | None = None


def values_of(
    batch: Batch,
    memories: list[LocalMemory],
    parts: npt.ArrayLike,
    bounds: int | list[int],
    policy: PutPolicy | None,
) -> Values:
    """Values that are made of parts (WRITTEN) of memories. Raises ValueInvalid."""
    given, where = as_parts(parts, WRITTEN, len(batch), bounds)
    sizes, places = sizes_and_places(given, len(batch))
    nowhere = np.zeros_like(sizes)
    sources = [Source(memory, nowhere, places[where == i]) for i, memory in enumerate(memories)]
    return Values(batch, sizes, sources, policy)


@dataclass(slots=True)
class PutResult:
    """What became of a batch.

    Attributes:
        outcomes: of each key one byte, a number of Outcome: STORED, EXISTS, FULL, FAILED or LOST.
        room: the store's room when something was FULL.
        reason: why something FAILED or was LOST.
    """

    outcomes: bytes
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

    def put(self, values: Values, if_exists: IfExists, handed: Handed | None = None) -> PutResult:
        """Store every value that can be; see :class:`PutResult`. Raises MasterError, StoreClosed.

        ``handed``: what has been done already, to be gone on with.
        """
        self.require(values.policy)
        began_s, failed = time.monotonic() if handed is None else handed.began_s, True
        try:
            result = _Put(self, values, if_exists, handed).run()
            failed = False
        finally:
            self.membership.counters.observe("put", time.monotonic() - began_s, failed=failed)
        self._count(result.outcomes, values.sizes)
        return result

    def require(self, policy: PutPolicy | None) -> None:
        """Raises ProtocolMismatch where the master is too old for what is asked for."""
        minor = self.membership.minor
        if policy is not None and policy.stripes > 1 and minor < STRIPES_SINCE_MINOR:
            raise ProtocolMismatch(
                f"stripes is {policy.stripes}, and the store master speaks minor {minor} of the protocol, in "
                f"which there are none; upgrade its mooncake-store, or put with stripes=1"
            )

    def write(self, memory: LocalMemory, layout: Layout, until_s: float, avoid: Container[int] = ()) -> Moved:
        """As ``Mover.write``, at one go, and for ``transfer_timeout_s`` at most."""
        enough_s = TimeBudget(self.config.transfer_timeout_s).begin(layout.nbytes, tries=1)
        compare = self.membership.checksums
        moved = self.mover.write(memory, layout, min(enough_s, until_s), avoid, compare=compare)
        self.membership.counters.differed(wire=moved.differed)
        return moved

    def commit(
        self,
        reservation: int,
        epoch: int,
        failed: list[int],
        count: int,
        if_exists: IfExists,
        sums: bytes = b"",
    ) -> bytes:
        """Commit a reservation of ``count`` values but those at positions ``failed``; what became of each."""
        request = protocol.Commit(
            reservation=reservation,
            failed=failed,
            if_exists=if_exists,
            notices_seen=self.notices.seen_of(epoch),
            sums=sums,
        )
        committed = self.membership.conclude(request, epoch, protocol.Committed)
        return bytes([LOST]) * count if committed is None else self.take(committed, epoch, count)

    def committed(self, handed: Handed) -> bytes:
        """What became of the value that was committed before this was handed over."""
        asked = protocol.Commit(reservation=0, failed=[], if_exists="keep", notices_seen=0)
        committed = express_reply(asked, handed.committed)
        assert isinstance(committed, protocol.Committed)
        return self.take(committed, handed.epoch, 1)

    def take(self, committed: protocol.Committed, epoch: int, count: int) -> bytes:
        """Take in what the master of ``epoch`` says of ``count`` values; what became of each."""
        self.notices.accept(epoch, committed.notices)
        # What left the segment before this commit is told before the put returns, so that news of a key's
        # old bytes never comes after its new ones are known.
        self.notices.flush(self.config.notice_wait_s)
        return committed.outcomes or bytes([LOST]) * count

    def _count(self, outcomes: bytes, sizes: Uints) -> None:
        stored = outcomes.count(STORED)
        if stored < len(outcomes):
            sizes = sizes[np.frombuffer(outcomes, dtype=np.uint8) == STORED]
        self.membership.counters.wrote(
            stored=stored,
            kept=outcomes.count(EXISTS),
            refused=outcomes.count(FULL) + outcomes.count(QUOTA),
            failed=outcomes.count(FAILED) + outcomes.count(LOST),
            nbytes=sum(sizes.tolist()),
        )


class _Put:
    """One batch on its way into the store."""

    def __init__(self, writer: Writer, values: Values, if_exists: IfExists, handed: Handed | None) -> None:
        self._writer = writer
        self._handed = handed
        self._values = values
        self._if_exists: IfExists = if_exists
        self._result = PutResult(bytes([FULL]) * len(values.batch))
        self._avoid: set[int] = set()
        self._budget = TimeBudget(writer.config.transfer_timeout_s)
        self._tries = MOVE_ATTEMPTS
        self._sums: Uints | None = None
        if writer.membership.checksums:
            self._sums = sums_of(list(values.sources), values.sizes)

    def run(self) -> PutResult:
        """Try until everything is decided: again elsewhere after a failure, later when room may come."""
        wait_until_s = time.monotonic() + self._writer.config.put_wait_s
        pause_s = FIRST_PAUSE_S
        todo = list(range(len(self._result.outcomes)))
        while todo:
            may_come = self._round(todo) and time.monotonic() < wait_until_s
            outcomes = self._result.outcomes
            if outcomes.count(STORED) == len(outcomes) or not any(map(outcomes.count, (FULL, *UNDONE))):
                break  # the usual end
            failed = [i for i in todo if outcomes[i] in UNDONE]
            full = [i for i in todo if outcomes[i] == FULL]
            self._tries -= bool(failed)
            todo = sorted((failed if self._tries > 0 else []) + (full if may_come else []))
            if todo and not failed:
                # Somebody reads what would have to go. Nobody tells when that ends, so look again.
                self._writer.closing.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self._result

    def _round(self, todo: list[int]) -> bool:
        """Try the keys at the positions ``todo`` once; whether waiting may help those that found no room."""
        batch, result = self._values.batch, self._result
        handed, self._handed = self._handed, None
        asked_s, count = time.monotonic() if handed is None else handed.began_s, len(batch)
        all_of_it = len(todo) == count
        request = protocol.Reserve(
            digests=batch.packed if all_of_it else batch.digests[todo].tobytes(),
            keys=batch.keys if all_of_it else [batch.keys[i] for i in todo],
            sizes=(self._values.sizes if all_of_it else self._values.sizes[todo]).tobytes(),
            if_exists=self._if_exists,
            avoid=sorted(self._avoid),
            policy=self._values.policy,
        )
        if self._writer.notices.wanted:
            self._writer.notices.wrote(request.digests, request.keys)
        if handed is None:
            reserved = self._writer.membership.ask(request, protocol.Reserved)
        else:
            reserved = _reserved(request, handed)
        outcomes = reserved.outcomes
        placed = outcomes.count(PLACED)
        if placed:
            deadline_s = asked_s + DEADLINE_MARGIN * self._writer.membership.reservation_ttl_s
            epoch = request.epoch
            moves = [
                (source.memory, source.layout(reserved.placement, todo, count, epoch))
                for source in self._values.sources
            ]
            nbytes = sum([layout.nbytes for _, layout in moves])
            until_s = min(deadline_s, self._budget.begin(nbytes, self._tries))
            moved = self._move(moves, until_s, reserved.reservation, placed, handed)
            failed = _numbers_of(moved.failed, outcomes) if moved.failed else []
            if handed is not None and handed.committed:
                committed = self._writer.committed(handed)
            else:
                sums = b"" if self._sums is None else self._sums_of(todo, outcomes)
                committed = self._commit(reserved.reservation, epoch, failed, placed, sums)
            outcomes = committed if placed == len(outcomes) else _decided(outcomes, committed)
            self._avoid |= moved.segments
            lost = "the reservation or its segment was lost before the commit"
            result.reason = moved.reason or lost
        result.outcomes = _merged(result.outcomes, todo, outcomes)
        result.room = reserved.room or result.room
        return reserved.wait

    def _move(
        self,
        moves: list[tuple[LocalMemory, Layout]],
        deadline_s: float,
        reservation: int,
        count: int,
        handed: Handed | None,
    ) -> Moved:
        moved = Moved()
        try:
            if handed is None or handed.stage == Stage.ANSWERED:
                compare = self._sums is None and self._writer.membership.checksums
                for memory, layout in moves:
                    moved.add(self._writer.mover.write(memory, layout, deadline_s, compare=compare))
                self._budget.end()
                self._writer.membership.counters.differed(wire=moved.differed)
                return moved
            if handed.failure is not None:
                self._writer.mover.failed(moved, moves[0][1], handed.segment, 1, handed.failure)
            self._budget.spend(handed.late_s)
            return moved
        except BaseException:
            try:
                self._commit(reservation, moves[0][1].epoch, list(range(count)), count)
            except StoreError as error:
                log.debug("a reservation was not revoked, it will expire: %s", error)
            raise

    def _sums_of(self, todo: list[int], outcomes: bytes) -> bytes:
        """Checksums of the values placed, in their order."""
        assert self._sums is not None
        placed = np.frombuffer(outcomes, dtype=np.uint8) == PLACED
        return bytes(self._sums[todo][placed].astype("<u8").tobytes())

    def _commit(
        self, reservation: int, epoch: int, failed: list[int], count: int, sums: bytes = b""
    ) -> bytes:
        return self._writer.commit(reservation, epoch, failed, count, self._if_exists, sums)


def _reserved(request: protocol.Reserve, handed: Handed) -> protocol.Reserved:
    request.epoch = handed.epoch
    reserved = express_reply(request, handed.answer)
    assert isinstance(reserved, protocol.Reserved)
    return reserved


def _numbers_of(failed: set[int], outcomes: bytes) -> list[int]:
    """Which of the values placed failed, numbered as those are."""
    placed = [position for position, outcome in enumerate(outcomes) if outcome == PLACED]
    return [number for number, position in enumerate(placed) if position in failed]


def _decided(outcomes: bytes, committed: bytes) -> bytes:
    """The outcomes, with those ``committed`` in the place of PLACED."""
    decided = np.frombuffer(outcomes, dtype=np.uint8).copy()
    decided[decided == PLACED] = np.frombuffer(committed, dtype=np.uint8)
    together: bytes = decided.tobytes()
    return together


def _merged(before: bytes, todo: list[int], outcomes: bytes) -> bytes:
    """The outcomes of all, after those at the positions ``todo`` have been tried again."""
    if len(outcomes) == len(before) and FULL not in outcomes:
        return outcomes
    merged, tried = np.frombuffer(before, dtype=np.uint8).copy(), np.frombuffer(outcomes, dtype=np.uint8)
    # No room anywhere else: the failure before is what the caller has to know.
    kept = (tried == FULL) & np.isin(merged[todo], UNDONE)
    merged[todo] = np.where(kept, merged[todo], tried)
    together: bytes = merged.tobytes()
    return together
