"""Objects, the segments they lie in and the order in which they leave, kept consistent with each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mooncake_store._errors import RoomNumbers
from mooncake_store.catalog import Catalog, ObjectState, StoredObject
from mooncake_store.eviction import Clock
from mooncake_store.placement import Extent, Segment, SegmentPool, Use
from mooncake_store.protocol import IfExists, Outcome

__all__ = ["Counts", "Departure", "Inventory"]


class Departure(NamedTuple):
    """A value that can no longer be found, and the version that replaced it, if any."""

    entry: StoredObject
    successor: StoredObject | None


class Counts:
    """What has happened since the master started."""

    def __init__(self) -> None:
        self.stored = self.evicted = self.removed = self.lost = 0


class Inventory:
    """What the store holds. Not thread-safe; knows neither clients nor time.

    ``departures`` collects what left, in order, until somebody takes the list.
    """

    def __init__(self, evict_reserve_fraction: float) -> None:
        self.catalog = Catalog()
        self.pool = SegmentPool()
        self.clock = Clock()
        self.counts = Counts()
        self.departures: list[Departure] = []
        self._evict_reserve_fraction = evict_reserve_fraction

    def room(self) -> RoomNumbers:
        """Capacity, free, evictable, leased and reserved bytes."""
        used = [self.pool.used_bytes(use) for use in (Use.EVICTABLE, Use.LEASED, Use.RESERVED)]
        return (self.pool.capacity_bytes, self.pool.free_bytes, used[0], used[1], used[2])

    def add_segment(self, segment: Segment) -> None:
        """Take in a segment, empty."""
        self.pool.add(segment)

    def drop_segment(self, segment_id: int) -> None:
        """Forget a segment. Everything with bytes in it is gone at once, for those who read it now, too."""
        segment = self.pool.drop(segment_id)
        for version in sorted(segment.versions):
            entry = self.catalog.version(version)
            entry.broken = True
            if entry.state is ObjectState.COMMITTED:
                self.counts.lost += 1
                self._hide(entry)

    def reserve(
        self, digest: bytes, key: bytes, nbytes: int, *, client: int, avoid: Iterable[int]
    ) -> StoredObject | None:
        """Room for a new value, evicting what must go for it; None when that is not enough."""
        extents = self._make_room(nbytes, client, self.pool.usable(avoid))
        if extents is None:
            return None
        entry = self.catalog.reserve(digest, key, client, nbytes, extents)
        for extent in extents:
            self.pool.segments[extent.segment].versions.add(entry.version)
        self._book(entry)
        return entry

    def commit(self, entries: Sequence[StoredObject], if_exists: IfExists) -> list[Outcome]:
        """Make reserved values findable, all that can be, in order; the others give their room back."""
        outcomes = [self._commit_one(entry, if_exists) for entry in entries]
        # Tail first, so that the blocks of a prefix are younger than what builds on them.
        for entry in reversed(entries):
            if entry.state is ObjectState.COMMITTED:
                self.clock.insert(entry.version)
        return outcomes

    def abandon(self, entry: StoredObject) -> None:
        """Give a reservation's room back. Nobody may write to it any more."""
        assert entry.state is ObjectState.RESERVED, f"version {entry.version} is {entry.state}"
        self._free(entry)

    def remove(self, entry: StoredObject) -> None:
        """Make a value unfindable; its bytes are freed when nobody reads them any more."""
        self.counts.removed += 1
        self._hide(entry)

    def touch(self, entries: Iterable[StoredObject]) -> None:
        """Count a use of each."""
        for entry in entries:
            self.clock.touch(entry.version)

    def lease(self, entry: StoredObject) -> None:
        """Keep the bytes of a findable value in place until :meth:`unlease`."""
        assert entry.state is ObjectState.COMMITTED, f"version {entry.version} is {entry.state}"
        entry.leases += 1
        self.clock.pin(entry.version)
        self._book(entry)

    def unlease(self, entry: StoredObject) -> None:
        """End one lease. The last one frees what was hidden meanwhile."""
        assert entry.leases > 0, f"version {entry.version} has no lease"
        entry.leases -= 1
        if entry.state is ObjectState.COMMITTED:
            self.clock.unpin(entry.version)
            self._book(entry)
        elif not entry.leases:
            self._free(entry)

    def _commit_one(self, entry: StoredObject, if_exists: IfExists) -> Outcome:
        current = self.catalog.find(entry.digest)
        if entry.broken or (current is not None and if_exists != "replace"):
            self._free(entry)
            return Outcome.LOST if entry.broken else Outcome.EXISTS
        if current is not None:
            self.counts.removed += 1
            self._hide(current, successor=entry)
        self.catalog.commit(entry)
        self._book(entry)
        self.counts.stored += 1
        return Outcome.STORED

    def _make_room(self, nbytes: int, client: int, usable: list[Segment]) -> tuple[Extent, ...] | None:
        extents = self.pool.place(nbytes, usable, client)
        if extents is not None:
            return extents
        within_reach = sum(s.free_space.free_bytes + s.used_bytes[Use.EVICTABLE] for s in usable)
        if within_reach < nbytes:
            return None  # evicting everything would not do: evict nothing
        while extents is None and (victim := self.clock.victim()) is not None:
            self._evict(victim)
            if sum(s.free_space.free_bytes for s in usable) >= nbytes:
                extents = self.pool.place(nbytes, usable, client)
        if extents is not None:
            self._evict_reserve()
        return extents

    def _evict_reserve(self) -> None:
        # Room for the next puts, so that not every one of them has to evict; never at the price of a value
        # that is larger than the reserve.
        missing = self._evict_reserve_fraction * self.pool.capacity_bytes - self.pool.free_bytes
        while missing > 0 and (victim := self.clock.victim()) is not None:
            size = self.pool.taken_bytes(self.catalog.version(victim).extents)
            if not 0 < size <= missing:
                return
            self._evict(victim)
            missing -= size

    def _evict(self, version: int) -> None:
        self.counts.evicted += 1
        self._hide(self.catalog.version(version))

    def _hide(self, entry: StoredObject, successor: StoredObject | None = None) -> None:
        self.catalog.hide(entry)
        if entry.version in self.clock:
            self.clock.remove(entry.version)
        self.departures.append(Departure(entry, successor))
        if entry.leases:
            self._book(entry)
        else:
            self._free(entry)

    def _book(self, entry: StoredObject) -> None:
        if entry.state is ObjectState.RESERVED:
            use = Use.RESERVED
        else:
            use = Use.LEASED if entry.leases else Use.EVICTABLE
        if use is not entry.use:
            self.pool.charge(entry.extents, entry.use, use)
            entry.use = use

    def _free(self, entry: StoredObject) -> None:
        self.pool.charge(entry.extents, entry.use, None)
        entry.use = None
        self.pool.free(entry.extents)
        for extent in entry.extents:
            segment = self.pool.segments.get(extent.segment)
            if segment is not None:
                segment.versions.discard(entry.version)
        self.catalog.forget(entry)
