"""The object map: which key has which bytes where, and what state they are in.

A stored version of a key goes RESERVED -> COMMITTED -> HIDDEN. It is found by its key only while COMMITTED.
HIDDEN ones were removed, replaced or evicted while somebody read them: their bytes stay until the last
lease ends.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mooncake_store.placement import Extent, Use

__all__ = ["Catalog", "ObjectState", "StoredObject"]


class ObjectState(enum.Enum):
    """Life of one stored version."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    HIDDEN = "hidden"


@dataclass(slots=True, eq=False)
class StoredObject:
    """One version of one key.

    Attributes:
        writer: the client that put it.
        version: unique in one life of the master, rising in the order of reservations.
        leases: how many leases cover it now.
        use: how its bytes are booked.
        broken: a segment with some of its bytes has gone; whoever reads or writes it has nothing.
    """

    digest: bytes
    key: bytes
    writer: int
    version: int
    nbytes: int
    extents: tuple[Extent, ...]
    state: ObjectState = ObjectState.RESERVED
    leases: int = 0
    use: Use | None = None
    broken: bool = False

    def segments(self) -> set[int]:
        """Ids of the segments its bytes lie in."""
        return {extent.segment for extent in self.extents}


class Catalog:
    """Objects by key and by version. Not thread-safe."""

    def __init__(self) -> None:
        self._visible: dict[bytes, StoredObject] = {}
        self._by_version: dict[int, StoredObject] = {}
        self._last_version = 0

    def __len__(self) -> int:
        """Number of objects that can be found."""
        return len(self._visible)

    @property
    def objects(self) -> list[StoredObject]:
        """Every version that still has bytes, in whatever state."""
        return list(self._by_version.values())

    def find(self, digest: bytes) -> StoredObject | None:
        """The committed version of a key."""
        return self._visible.get(digest)

    def version(self, version: int) -> StoredObject:
        """The object of a version. Raises KeyError."""
        return self._by_version[version]

    def reserve(
        self, digest: bytes, key: bytes, writer: int, nbytes: int, extents: tuple[Extent, ...]
    ) -> StoredObject:
        """Note a new version whose bytes are still to come."""
        self._last_version += 1
        entry = StoredObject(digest, key, writer, self._last_version, nbytes, extents)
        self._by_version[entry.version] = entry
        return entry

    def commit(self, entry: StoredObject) -> None:
        """Make a reserved version the one that is found. The one before it must have been hidden."""
        assert entry.state is ObjectState.RESERVED, f"version {entry.version} is {entry.state}"
        assert entry.digest not in self._visible, f"key {entry.key!r} has a version already"
        entry.state = ObjectState.COMMITTED
        self._visible[entry.digest] = entry

    def hide(self, entry: StoredObject) -> None:
        """Make a committed version unfindable, at once."""
        assert entry.state is ObjectState.COMMITTED, f"version {entry.version} is {entry.state}"
        entry.state = ObjectState.HIDDEN
        del self._visible[entry.digest]

    def forget(self, entry: StoredObject) -> None:
        """Drop a version whose bytes are given back. It must not be found or leased any more."""
        assert entry.state is not ObjectState.COMMITTED, f"version {entry.version} can still be found"
        assert entry.leases == 0, f"version {entry.version} has {entry.leases} leases"
        del self._by_version[entry.version]
