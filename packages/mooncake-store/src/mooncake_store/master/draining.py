"""One segment on its way to being empty: what lies there, pass by pass, and when its owner may leave."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from mooncake_store._core import ObjectMap
from mooncake_store.master.fences import Fences
from mooncake_store.master.objects import Objects
from mooncake_store.protocol import CopyOutcome, Drained

__all__ = ["DrainingSegment"]

END = 2**32 - 1  # there are no more slots
SLOTS_AT_ONCE, LOOKS_AT_ONCE = 1 << 16, 16
# From one pass to the next: looking at so many slots a second is what it may cost.
FIRST_PAUSE_S, SLOTS_PER_S = 0.01, 5e6
STUCK_AFTER = 3  # passes in which nothing left


class DrainingSegment:
    """Passes over what lies in a segment. Not thread-safe.

    A value of which enough replicas stay elsewhere leaves without a copy. One that cannot be copied, but has
    another replica, is left to that one. What is being put here is waited for, and so are those that began to
    read here before everything was elsewhere: who comes later reads there. Room of writers that are late is
    not waited for: nobody will commit it.
    """

    def __init__(
        self, objects_map: ObjectMap, objects: Objects, fences: Fences, segment: int, *, too_old: bool
    ) -> None:
        """``too_old``: the segment's owner does not know how to copy."""
        self._map = objects_map
        self._objects = objects
        self._fences = fences
        self._segment = segment
        self._too_old = too_old
        self._pending: deque[tuple[int, int]] = deque()
        self._at = self._looks = 0
        self._pause_until_s = 0.0
        self._left = self._reading = self._open = 0  # of this pass; open: to be waited for
        self._progress = self._idle_passes = 0
        self._reasons: Counter[str] = Counter()
        self._shown = Drained(segment=segment, on=True)
        self._clean = False
        self._mark: int | None = None  # the last lease under which somebody may read here
        self._moved = self._moved_bytes = self._gone = 0

    @staticmethod
    def idle(objects_map: ObjectMap, segment: int) -> Drained:
        """The report of a segment that is not to be empty."""
        capacity, free, *_ = objects_map.segment_room(segment)
        return Drained(segment=segment, on=False, left_bytes=capacity - free)

    def values(self, most_bytes: int, now_s: float, *, settled: bool = True) -> Iterator[tuple[int, int]]:
        """Slots and versions of what is to be copied: all of this pass, or what a part of it finds.

        Not ``settled``: other owners' ledgers may yet complete values of which a part lies here.
        """
        for _ in range(LOOKS_AT_ONCE):
            while self._pending:
                yield self._pending.popleft()
            if self._at == END:
                return self._end_pass(now_s)
            if self._at == 0 and now_s < self._pause_until_s:
                return
            found = self._map.lying_in(self._segment, self._at, SLOTS_AT_ONCE, most_bytes)
            first = self._at
            refs, self._at, leased, arriving, reserved, copying = found
            reserved -= self._fences.waiting_in(self._segment, first, self._at)
            self._looks += 1
            self._pending.extend(refs)
            self._left += len(refs)
            self._reading += leased
            incomplete = not settled and self._taken_bytes() > 0
            self._open += arriving + reserved + copying + incomplete

    @property
    def goes_on(self) -> bool:
        """Whether a pass has begun and is not over."""
        return self._at != 0 or bool(self._pending)

    def ended(self, at: int, version: int, nbytes: int, outcome: CopyOutcome) -> None:
        """What became of one copy."""
        if outcome is CopyOutcome.STORED:
            self._moved += 1
            self._moved_bytes += nbytes
            self._progress += 1
        elif outcome is CopyOutcome.GONE:
            self._gone += 1
            self._progress += 1
        elif outcome in (CopyOutcome.FULL, CopyOutcome.NOWHERE) and self._map.relinquish(
            at, version, self._segment
        ):
            self._progress += 1
        elif outcome is not CopyOutcome.THERE:
            self._reasons[outcome.name] += 1

    def report(self) -> Drained:
        """How far it is. ``done`` is not taken back unless a later pass finds something."""
        if self._too_old:
            self._shown.stuck, self._shown.reasons = True, {"its owner's release cannot copy": 1}
        return msgspec.structs.replace(
            self._shown,
            left_bytes=self._taken_bytes(),
            moved=self._moved,
            moved_bytes=self._moved_bytes,
            gone=self._gone,
            done=self._clean and not self._is_read(),
        )

    def look_again(self) -> None:
        """There may be room now where there was none: that the last pass was stuck says nothing any more."""
        self._shown.stuck, self._idle_passes, self._pause_until_s = False, 0, 0.0

    def _taken_bytes(self) -> int:
        capacity, free, *_ = self._map.segment_room(self._segment)
        return capacity - free

    def _end_pass(self, now_s: float) -> None:
        self._pause_until_s = now_s + FIRST_PAUSE_S + self._looks * SLOTS_AT_ONCE / SLOTS_PER_S
        self._at = self._looks = 0
        self._clean = self._left == self._open == 0
        if not self._clean:
            self._mark = None
        elif self._mark is None:
            self._mark = self._objects.newest_lease
        idle = self._left and not self._progress
        self._idle_passes = self._idle_passes + 1 if idle else 0
        hopeless = self._reasons[CopyOutcome.NOWHERE.name] == self._left > 0
        self._shown = Drained(
            segment=self._segment,
            on=True,
            stuck=hopeless or self._idle_passes >= STUCK_AFTER,
            left=self._left,
            reading=self._reading,
            reasons=dict(self._reasons),
        )
        self._left = self._reading = self._open = self._progress = 0
        self._reasons.clear()

    def _is_read(self) -> bool:
        if not self._shown.reading or self._mark is None:
            return False
        leases = self._objects.slots_leased_until(self._mark)
        return any(self._map.lies_in(slots, self._segment) for slots in leases)
