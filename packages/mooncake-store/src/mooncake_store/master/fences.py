"""Room that a late writer may still write to, until its owner has shut that writer out."""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass

from mooncake_store._core import ObjectMap

__all__ = ["Fences"]

MOST_OLDER = 64
# A grant's deadline less its time to live is when it was given, but for rounding.
ROUNDING_S = 1e-6

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fence:
    """The access keys of one segment. Times are seconds of the master's clock.

    Attributes:
        current: descriptor with the key that is given out now.
        fenced_s: keys given out before this are void.
        begun_s: since when ``current`` is given out, while its owner has not taken the older ones back.
        latest_s: when the last of the writers that are waited for got its key.
        older: descriptors given out before, the oldest first.
    """

    current: bytes
    fenced_s: float
    begun_s: float | None = None
    latest_s: float = float("-inf")
    older: list[bytes] | None = None


class Fences:
    """What is not given out again yet, and what for. Not thread-safe."""

    def __init__(self, objects: ObjectMap, reservation_ttl_s: float) -> None:
        self._map = objects
        self._ttl_s = reservation_ttl_s
        self._fences: dict[int, _Fence] = {}
        self._waiting: list[tuple[bytes, float, set[int]]] = []  # slots, when they were reserved, segments

    def __len__(self) -> int:
        """How many reservations wait for an owner."""
        return len(self._waiting)

    def add(self, segment: int, descriptor: bytes, now_s: float) -> None:
        """A segment has come whose owner can fence; nobody who had a key to it before still has one."""
        self._fences[segment] = _Fence(descriptor, now_s)

    def drop(self, segment: int) -> None:
        """A segment is gone: its memory is never given out again under this id."""
        if self._fences.pop(segment, None) is not None:
            self._pass(segment, float("inf"))

    def give_up(self, slots: bytes, deadline_s: float) -> None:
        """A reservation has ended at its deadline without its writer having said that it writes no more.

        Its room is free when every owner has shut out those that had a key by then. That of an owner that
        knows no fence (before minor 3) is free now.
        """
        given_s = deadline_s - self._ttl_s + ROUNDING_S
        open_ = {
            segment
            for segment in self._map.segments_of(slots)
            if segment in self._fences and self._fences[segment].fenced_s <= given_s
        }
        if not open_:
            self._map.abandon(slots)
            return
        for segment in open_:
            fence = self._fences[segment]
            fence.latest_s = max(fence.latest_s, given_s)
        self._waiting.append((slots, given_s, open_))

    def waiting_in(self, segment: int, first: int, end: int) -> int:
        """How many of the slots from ``first`` to before ``end`` wait here, and have bytes in ``segment``."""
        slots = (at for given_up, _, _ in self._waiting for (at,) in struct.iter_unpack("<I", given_up))
        return sum(first <= at < end and self._map.lies_in(struct.pack("<I", at), segment) for at in slots)

    def wanted(self, segment: int) -> bool:
        """Whether the segment's owner is to take keys back, or has begun to and not ended."""
        fence = self._fences.get(segment)
        return fence is not None and (fence.begun_s is not None or fence.latest_s >= fence.fenced_s)

    def regrant(self, segment: int, previous: bytes, descriptor: bytes, now_s: float) -> bool:
        """The owner has a new key; False when ``previous`` is not in force (any more)."""
        fence = self._fences.get(segment)
        if fence is None or fence.current != previous:
            return False
        fence.older = [*(fence.older or []), fence.current][-MOST_OLDER:]
        fence.current, fence.begun_s = descriptor, now_s
        return True

    def fenced(self, segment: int, descriptor: bytes) -> None:
        """The owner has taken all older keys back, and nobody writes under them."""
        fence = self._fences.get(segment)
        if fence is None or fence.begun_s is None or fence.current != descriptor:
            return
        fence.fenced_s, fence.begun_s = fence.begun_s, None
        self._pass(segment, fence.fenced_s)

    def successor(self, descriptor: bytes) -> bytes:
        """The descriptor that has followed one of the same segment; empty when there is none."""
        for fence in self._fences.values():
            if descriptor == fence.current or descriptor in (fence.older or ()):
                return fence.current
        return b""

    def _pass(self, segment: int, fenced_s: float) -> None:
        """Nobody who got a key of this segment before then writes any more."""
        kept = []
        for slots, given_s, open_ in self._waiting:
            if given_s < fenced_s:
                open_.discard(segment)
            if open_:
                kept.append((slots, given_s, open_))
            else:
                log.info("room of a late writer is free: segment=%016x", segment)
                self._map.abandon(slots)
        self._waiting = kept
