"""Judges the sequence numbers of an event stream: next, seen before, gap, or a publisher that started
anew."""

from __future__ import annotations

import enum
from collections import OrderedDict

__all__ = ["SequenceTracker", "Verdict"]

REMEMBERED_BATCHES = 10_000  # as many as publishers keep for replay: older ones are never sent twice


class Verdict(enum.Enum):
    """What a sequence number means for the one who receives it."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"
    RESTART = "restart"


class SequenceTracker:
    """Follows one publisher. Pure: no sockets, no clock.

    A number lower than expected is either a batch that also came by replay, or the first of a publisher that
    started anew at zero. The payload tells them apart: a duplicate is byte for byte what was received under
    its number.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._seen: OrderedDict[int, int] = OrderedDict()

    @property
    def joined(self) -> bool:
        """Whether anything was received yet: before that, a first number above zero loses nothing known."""
        return bool(self._seen)

    def judge(self, sequence: int, payload: bytes) -> Verdict:
        """What this batch is. Changes nothing."""
        if sequence == self.expected:
            return Verdict.NEXT
        if sequence > self.expected:
            return Verdict.GAP
        return Verdict.DUPLICATE if self._seen.get(sequence) == hash(payload) else Verdict.RESTART

    def advance(self, sequence: int, payload: bytes) -> None:
        """The batch was taken in; the next one expected follows it."""
        self._seen[sequence] = hash(payload)
        if len(self._seen) > REMEMBERED_BATCHES:
            self._seen.popitem(last=False)
        self.expected = sequence + 1

    def restart(self) -> None:
        """Start from zero, as after a restart of the publisher."""
        self.expected = 0
        self._seen.clear()
