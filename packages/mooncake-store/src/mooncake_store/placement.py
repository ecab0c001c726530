"""The segments lent to the store, and where in them a value goes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_store.allocator import BestFit
from mooncake_store.config import MAX_EXTENTS

__all__ = ["Extent", "Segment", "SegmentPool", "Use"]


class Extent(NamedTuple):
    """One piece of an object: ``nbytes`` at ``offset`` of a segment."""

    segment: int
    offset: int
    nbytes: int


class Use(enum.IntEnum):
    """What bytes that are not free are good for now."""

    RESERVED = 0  # a put is going to fill them, or one that was given up may still write to them
    EVICTABLE = 1
    LEASED = 2  # being read


@dataclass(slots=True)
class Segment:
    """Memory one client lends.

    Attributes:
        id: unique in one life of the master, never used again.
        client: who lends it.
        descriptor: what others need to reach it through the transfer engine.
        free_space: its allocator.
        used_bytes: what is not free, one number for each Use.
        versions: of the objects with bytes here.
    """

    id: int
    client: int
    descriptor: bytes
    free_space: BestFit
    used_bytes: list[int] = field(default_factory=lambda: [0] * len(Use))
    versions: set[int] = field(default_factory=set)


class SegmentPool:
    """All segments of the store. Not thread-safe."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}

    @property
    def capacity_bytes(self) -> int:
        """All memory lent, in whole granules."""
        return sum(segment.free_space.capacity_bytes for segment in self.segments.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing takes."""
        return sum(segment.free_space.free_bytes for segment in self.segments.values())

    def used_bytes(self, use: Use) -> int:
        """Bytes with this use, in whole granules."""
        return sum(segment.used_bytes[use] for segment in self.segments.values())

    def add(self, segment: Segment) -> None:
        """Take a segment in."""
        self.segments[segment.id] = segment

    def drop(self, segment: int) -> Segment:
        """Let a segment go. What lay in it is no longer the pool's; freeing it later is allowed and does
        nothing.
        """
        return self.segments.pop(segment)

    def usable(self, avoid: Iterable[int] = ()) -> list[Segment]:
        """Segments in which something may be placed: all but those in ``avoid``."""
        avoided = set(avoid)
        return [segment for segment in self.segments.values() if segment.id not in avoided]

    @staticmethod
    def place(nbytes: int, usable: list[Segment], client: int) -> tuple[Extent, ...] | None:
        """Room for ``nbytes``: in the client's own segment if it fits, else in the emptiest, else across
        several.

        Returns at most ``MAX_EXTENTS`` extents in order, or None when it does not fit.
        """
        order = sorted(usable, key=lambda s: (s.client != client, -s.free_space.free_bytes))
        for segment in order:
            if segment.free_space.free_bytes >= nbytes:
                pieces = segment.free_space.allocate(nbytes, MAX_EXTENTS)
                if pieces is not None:
                    return tuple(Extent(segment.id, *piece) for piece in pieces)
        return SegmentPool._spread(nbytes, order)

    @staticmethod
    def _spread(nbytes: int, order: list[Segment]) -> tuple[Extent, ...] | None:
        # Largest holes first, wherever they are: with a fixed number of extents nothing else can hold more.
        extents: list[Extent] = []
        missing = nbytes
        while missing and len(extents) < MAX_EXTENTS:
            segment = max(order, key=lambda s: s.free_space.largest_hole_bytes, default=None)
            hole = segment.free_space.largest_hole_bytes if segment else 0
            if segment is None or not hole:
                break
            pieces = segment.free_space.allocate(min(hole, missing), 1)
            assert pieces is not None, "the largest hole holds what is not larger than it"
            extents += [Extent(segment.id, *piece) for piece in pieces]
            missing -= min(hole, missing)
        if missing:
            for extent in extents:
                next(s for s in order if s.id == extent.segment).free_space.free(extent.offset, extent.nbytes)
            return None
        return tuple(extents)

    def charge(self, extents: Iterable[Extent], before: Use | None, after: Use | None) -> None:
        """Book the extents' bytes from one use to another; None is free. Segments that have gone are passed
        over.
        """
        for extent in extents:
            segment = self.segments.get(extent.segment)
            if segment is not None:
                taken = segment.free_space.rounded(extent.nbytes)
                if before is not None:
                    segment.used_bytes[before] -= taken
                if after is not None:
                    segment.used_bytes[after] += taken

    def taken_bytes(self, extents: Iterable[Extent]) -> int:
        """Whole granules that the extents take of segments which are still there."""
        return sum(
            self.segments[e.segment].free_space.rounded(e.nbytes)
            for e in extents
            if e.segment in self.segments
        )

    def free(self, extents: Iterable[Extent]) -> None:
        """Give extents back. Those of segments that have gone are passed over."""
        for extent in extents:
            segment = self.segments.get(extent.segment)
            if segment is not None:
                segment.free_space.free(extent.offset, extent.nbytes)
