"""Gets: locate under a lease, move, release, for a whole batch at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mooncake_store import protocol
from mooncake_store._errors import KeyNotFound, LeaseExpired, StoreError
from mooncake_store.batch import Digests
from mooncake_store.checksums import sums_in
from mooncake_store.keys import Key
from mooncake_store.membership import Membership, lease_clock
from mooncake_store.mover import Layout, LocalMemory, Moved, Mover
from mooncake_store.parts import POSITION, SEGMENT, Uints
from mooncake_store.protocol import Placement
from mooncake_store.protocol.express import express_reply
from mooncake_store.quick import Handed, Stage
from mooncake_store.tiers.reading import TierReading
from mooncake_store.time_budget import TimeBudget

__all__ = ["Reading", "missing", "require_good", "twice"]

NOTHING: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
NO_SIZES: Uints = np.zeros(0, dtype=np.uint64)

R = TypeVar("R")

log = logging.getLogger(__name__)


class Reading:
    """One batch being read; a context manager whose body moves the bytes.

    The lease keeps the bytes where they are. Whether it held until the end is known only afterwards: what
    was read is good only where ``good`` says so, after the context has ended.

    Attributes:
        found: which keys have values.
        sizes: of the values, 0 where there is none.
        good: which values were read completely and correctly; set at the end of the context.
        expired: which were there and may have been read, but under a lease that is not known to have held;
            set then, too.
    """

    def __init__(
        self,
        membership: Membership,
        mover: Mover,
        batch: Digests,
        transfer_timeout_s: float,
        handed: Handed | None = None,
    ) -> None:
        """``handed``: what has been done already, to be gone on with; its bytes lie where :meth:`fetch` is
        told to bring them.
        """
        self._handed = handed
        self._membership = membership
        self._mover = mover
        self._batch = batch
        self._transfer_timeout_s = transfer_timeout_s
        self._request = protocol.Locate(digests=batch.packed, summed=membership.checksums)
        self._located: protocol.Located
        self._sums: Uints | None = None
        self._failed: set[int] = set()
        self._differed: set[int] = set()  # those of them whose bytes arrived, and were not what was put
        self._condemned: list[tuple[int, int]] = []  # position, segment: such bytes, twice the same
        self._silent: set[int] = set()  # segments that are not waited for again
        self._refused = False
        self._tiered: TierReading | None = None
        self._parts: list[Uints] = []
        self._whole = False
        self._extents: dict[int, tuple[int, int, int]] | None = None
        self._began_s = self._asked_s = 0.0
        # Until the master has answered, nothing is known.
        self.found: npt.NDArray[np.bool_] = NOTHING
        self._in_memory = self.found
        self.sizes: Uints = NO_SIZES
        self.good: npt.NDArray[np.bool_] = NOTHING
        self.expired: npt.NDArray[np.bool_] = NOTHING

    def fetch(self, memory: LocalMemory, offsets: Uints) -> None:
        """Move every value found to its offset in ``memory``."""
        self._whole = True
        self._read(memory, lambda placement, _: Layout(placement, offsets, self._request.epoch))
        if self._tiered is not None:
            rows = [(i, 0, offsets[i], nbytes) for i, nbytes in self._tiered.sizes.items()]
            parts = np.array(rows, dtype=np.uint64)
            self._tiered.fetch_parts(memory, parts, self._transfer_timeout_s)

    def fetch_parts(self, memory: LocalMemory, parts: Uints) -> None:
        """Move parts of the values found: rows of position, offset inside the value, local offset, bytes.

        Those of values of which a part did not move before are left out.
        """
        self._parts.append(parts)
        if self._failed:
            parts = parts[~np.isin(parts[:, 0], list(self._failed))]
        at_hand = parts[self._in_memory[parts[:, 0].astype(np.intp)]]

        def layout(placement: Placement, only: set[int] | None) -> Layout:
            wanted = at_hand if only is None else parts[np.isin(parts[:, 0], list(only))]
            return Layout.of_parts(placement, wanted, self._request.epoch)

        self._read(memory, layout)
        if self._tiered is not None:
            self._tiered.fetch_parts(memory, parts, self._transfer_timeout_s)

    @property
    def epoch(self) -> int:
        """Of the master that gave the lease."""
        return self._request.epoch

    def extent(self, position: int) -> tuple[int, int, int] | None:
        """Segment, offset there and bytes of the nearest replica of a value, or of its first piece."""
        if self._extents is None:
            rows = np.frombuffer(self._located.placement.rows, dtype="<u8").reshape(-1, 5)
            self._extents = {
                number: (at, offset, size) for number, inside, at, offset, size in rows.tolist() if not inside
            }
        return self._extents.get(position)

    def descriptor(self, segment: int) -> bytes:
        """What reaches a segment that :meth:`extent` names."""
        return self._located.placement.segments[segment]

    def holds(self) -> bool:
        """Whether the lease is known to have held until the last heartbeat; asks nobody."""
        return self._membership.holds(self._located.lease, self._request.epoch)

    def confirms(self) -> bool:
        """Whether the lease has held until now, as the master says, which is asked."""
        return self._membership.confirms(self._located.lease, self._request.epoch)

    def copied(self, positions: list[int]) -> list[bool]:
        """Which of these values, which were fetched, are right, though the lease goes on."""
        tiered = self._tiered
        held = self.holds()
        good = []
        for position in positions:
            if tiered is not None and position in tiered.sizes:
                good.append(position not in tiered.failed)
            else:
                good.append(held and position not in self._failed)
                self.expired[position] = not held and position not in self._failed
        return good

    def end(self) -> None:
        """End the lease, and have the master say until when it held: for memory that others may write to
        again while it is looked at, which no access key keeps away. Raises StoreError.
        """
        try:
            self._release(in_order=False)
        finally:
            self._count(failed=False)

    def drop(self) -> None:
        """End the lease without asking whether it held, and without waiting."""
        if self._located.lease:
            self._membership.let_go(self._located.lease, self._request.epoch, self._asked_s, soon=True)
        self.good = self.found.copy()
        self.good[list(self._failed)] = False
        self._count(failed=False)

    def _read(self, memory: LocalMemory, layout: Callable[[Placement, set[int] | None], Layout]) -> None:
        """From the nearest replica of each; what fails there from the next nearest."""
        nearest, others = self._located.placement, self._located.others
        budget = TimeBudget(self._transfer_timeout_s)
        failed = self._tried(layout(nearest, None), budget)
        if failed is None:
            failed = self._try(memory, layout(nearest, None), budget, 1 + len(others))
        every = [nearest.rows, *others]
        if failed and self._refused and self._reach():
            others = every
        failed = self._try_each(memory, layout, others, failed, budget)
        if failed and self._refused and self._reach():  # by one of the others
            failed = self._try_each(memory, layout, every, failed, budget)
        self._failed |= failed

    def _try_each(
        self,
        memory: LocalMemory,
        layout: Callable[[Placement, set[int] | None], Layout],
        replicas: list[bytes],
        failed: set[int],
        budget: TimeBudget,
    ) -> set[int]:
        """Which of the values that ``failed`` did not move from any of these replicas either."""
        for number, placed in enumerate(replicas):
            if not failed:
                break
            rows = np.frombuffer(placed, dtype="<u8").reshape(-1, 5)
            rows = rows[np.isin(rows[:, POSITION], list(failed))]
            segments = self._located.placement.segments
            placement = Placement(rows=rows.tobytes(), segments=segments)
            here = set(rows[:, POSITION].tolist())
            tries = len(replicas) - number
            failed = failed - here | self._try(memory, layout(placement, here), budget, tries)
        return failed

    def _tried(self, layout: Layout, budget: TimeBudget) -> set[int] | None:
        """Which values did not move before this was handed over; None when it was not tried."""
        handed, self._handed = self._handed, None
        if handed is None or handed.stage == Stage.ANSWERED:
            return None
        moved = Moved()
        if handed.failure is not None:
            self._mover.failed(moved, layout, handed.segment, 1, handed.failure)
        budget.spend(handed.late_s)
        return self._note(moved)

    def _try(self, memory: LocalMemory, layout: Layout, budget: TimeBudget, tries: int) -> set[int]:
        """Which values did not move."""
        compare = self._membership.checksums and not self._has_sums(layout)
        deadline_s = budget.begin(layout.nbytes, tries)
        moved = self._mover.read(memory, layout, deadline_s, self._silent, compare=compare)
        failed = self._note(moved)
        if self._sums is not None and not compare:
            failed = failed | self._look(memory, layout, failed, deadline_s)
        budget.end()
        return failed

    def _has_sums(self, layout: Layout) -> bool:
        """Whether all that moves are whole values whose checksums are known."""
        if self._sums is None or layout.owners is not None:
            return False
        return bool(self._sums[layout.rows[:, POSITION].astype(np.intp)].all())

    def _look(self, memory: LocalMemory, layout: Layout, failed: set[int], deadline_s: float) -> set[int]:
        """Which of the values that have come over a network are not what was put. They are read once more:
        what then is wrong in the same way lies so in its segment; else the way there has done it.
        """
        rows = layout.rows
        far = [self._mover.is_far(segment) for segment in rows[:, SEGMENT].tolist()]
        came = sorted(set(rows[far, POSITION].tolist()) - failed) if memory.readable else []
        first = self._wrong(memory, layout, came)
        if not first:
            return set()
        again = Placement(
            rows=rows[np.isin(rows[:, POSITION], list(first))].tobytes(), segments=layout.placement.segments
        )
        once_more = Layout(again, layout.offsets, layout.epoch)
        late = self._note(self._mover.read(memory, once_more, deadline_s, self._silent))
        second = self._wrong(memory, layout, sorted(first.keys() - late))
        self._differed |= second.keys()
        same = [p for p, sum_ in second.items() if first[p] == sum_ and self._lies_alone(layout, p)]
        for position in same:
            self._condemn(position, int(rows[rows[:, POSITION] == position][0, SEGMENT]))
        self._membership.counters.differed(wire=len(first) - len(same))
        return second.keys() | late

    def _condemn(self, position: int, segment: int) -> None:
        found = int(np.count_nonzero(self._in_memory[:position])), segment
        if found not in self._condemned:
            self._condemned.append(found)
            self._membership.counters.differed(memory=1)

    def _lies_alone(self, layout: Layout, position: int) -> bool:
        """Whether no other value of the batch was given some of its place, and has overwritten it."""
        starts, ends = layout.offsets, layout.offsets + self.sizes
        shares = self._in_memory & (starts < ends[position]) & (ends > starts[position])
        return int(np.count_nonzero(shares)) == 1

    def is_as_put(self, memory: LocalMemory, position: int, start: int, nbytes: int) -> bool:
        """Whether the whole value that lies there is what was put, as far as its checksum is known."""
        if self._sums is None or not self._sums[position]:
            return True
        found = sums_in(memory, np.array([start], dtype="<u8"), np.array([nbytes], dtype="<u8"))
        return bool(found[0] == self._sums[position])

    def _wrong(self, memory: LocalMemory, layout: Layout, positions: list[int]) -> dict[int, int]:
        """Checksums of what has arrived of these, where they are not those of the values."""
        if not positions:
            return {}
        assert self._sums is not None
        found = sums_in(memory, layout.offsets[positions], self.sizes[positions])
        wrong = found != self._sums[positions]
        return {positions[at]: int(found[at]) for at in np.flatnonzero(wrong).tolist()}

    def _note(self, moved: Moved) -> set[int]:
        self._silent |= moved.silent
        self._refused |= moved.refused
        self._membership.counters.differed(wire=moved.differed)
        return moved.failed

    def _reach(self) -> bool:
        """Whether what was refused may succeed now: owners change their keys while a long read goes on."""
        self._refused = False
        try:
            return self._membership.reach(self._located.placement.segments, self._request.epoch)
        except StoreError as error:
            log.debug("the master does not say how segments are reached now: %s", error)
            return False

    def __enter__(self) -> Reading:
        if self._handed is None:
            self._began_s, self._asked_s = time.monotonic(), lease_clock()
            self._located = self._membership.ask(self._request, protocol.Located)
        else:
            self._begin_with(self._handed)
        self.found = self._in_memory = np.frombuffer(self._located.found, dtype=np.bool_)
        self.good = np.zeros(len(self.found), dtype=np.bool_)
        self.expired = self.good.copy()
        self.sizes = np.frombuffer(self._located.sizes, dtype="<u8")
        if self._located.sums:
            self._sums = np.frombuffer(self._located.sums, dtype="<u8")
        if self._located.tiered is not None and self._mover.tiers is not None:
            tiered = self._tiered = TierReading(
                self._mover.tiers, self._located.tiered, self._batch.digests.tolist()
            )
            self.found, self.sizes = self.found.copy(), self.sizes.copy()
            for position, nbytes in tiered.sizes.items():
                self.found[position], self.sizes[position] = True, nbytes
        return self

    def _begin_with(self, handed: Handed) -> None:
        self._began_s, self._asked_s = handed.began_s, handed.asked_s
        self._request.epoch = handed.epoch
        located = express_reply(self._request, handed.answer)
        assert isinstance(located, protocol.Located)
        self._located = located
        if located.lease:
            self._membership.hold(located.lease, handed.epoch, handed.asked_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._release(in_order=error is None and not self._failed and not self._condemned)
        except StoreError as problem:
            if error is None:
                raise
            log.debug("a lease was not released, it will expire: %s", problem)
        finally:
            self._count(failed=error is not None)

    def _count(self, *, failed: bool) -> None:
        # Lists: numbers of arrays are slow for the few that there are mostly.
        hits = self.good.tolist().count(True)
        nbytes = sum(self.sizes[self.good].tolist()) if self._whole and hits else 0
        for parts in self._parts:
            nbytes += int(parts[self.good[parts[:, 0].astype(np.intp)], 3].sum())
        took_s = time.monotonic() - self._began_s
        self._membership.counters.read(took_s, hits, len(self._batch) - hits, nbytes, failed=failed)

    def _release(self, *, in_order: bool) -> None:
        """End the lease: by the way, when all went well, or at once."""
        if self._tiered is not None:
            self.good = np.zeros(len(self._batch), dtype=np.bool_)
            self.good[[i for i in self._tiered.sizes if i not in self._tiered.failed]] = True
        lease, epoch = self._located.lease, self._request.epoch
        if not lease:
            return
        broken: list[int] = []
        held = self._membership.let_go(lease, epoch, self._asked_s, soon=in_order)
        if not (held and in_order):
            request = protocol.Release(lease=lease, condemned=self._condemned)
            released = self._membership.conclude(request, epoch, protocol.Released)
            if released is None or released.expired:
                self.expired = self._in_memory.copy()
                self.expired[list(self._failed - self._differed)] = False
                return
            broken = released.broken
        good = self._in_memory
        if self._failed or broken:
            good = good.copy()
            good[list(self._failed)] = False
            good[np.flatnonzero(self._in_memory)[broken]] = False
        self.good = good if self._tiered is None else self.good | good


def missing(key: Key) -> KeyNotFound:
    """What a read of this key raises when it has no value."""
    return KeyNotFound(f"key {key!r:.80} is not in the store: never put, evicted, or lost with its owner")


def require_good(reading: Reading, key: Key) -> None:
    """Raises KeyNotFound or LeaseExpired when what was read of the one key is not right."""
    if reading.expired[0]:
        raise LeaseExpired(
            f"key {key!r:.80} was being read when its lease ended (the master was exchanged, or this process "
            f"was stopped for too long): what was read is void; a retry is safe"
        )
    if not reading.good[0]:
        raise missing(key)


def twice(read: Callable[[Handed | None], R], handed: Handed | None = None) -> R:
    """What ``read`` gives; tried once more, from its beginning, when its lease expired. Raises what the last
    try does.
    """
    try:
        return read(handed)
    except LeaseExpired as error:
        log.info("read once more: %s", error)
        return read(None)
