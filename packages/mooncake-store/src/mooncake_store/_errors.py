"""Exceptions of mooncake_store.

::

    StoreError
    ├─ ConfigError
    ├─ KeyInvalid
    ├─ KeyNotFound
    ├─ KeyExists
    ├─ ValueInvalid ─ SizeMismatch
    ├─ StoreFull
    ├─ PutFailed
    ├─ MasterError ─ MasterUnreachable · MasterRefused
    └─ StoreClosed

Every message says what failed, on what, why, and what to do about it. What the transfer engine raises while
memory is lent (``MemoryUnavailable``) passes through unchanged.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(StoreError, ValueError):
    """An option or argument has a value that cannot work; nothing was started."""


class KeyInvalid(StoreError, ValueError):
    """The key has the wrong type, is empty or too long; nothing was done."""


class KeyNotFound(StoreError, KeyError):
    """No such object, or its bytes are gone with the process that held them. Storing it again is the
    remedy.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class KeyExists(StoreError):
    """The key is taken and the caller asked not to keep or replace what is there; nothing was changed."""


class ValueInvalid(StoreError, ValueError):
    """A value, offset or size has the wrong type or does not fit its memory; nothing was done."""


class SizeMismatch(ValueInvalid):
    """The object does not have the size of the memory it should be read into. A retry fails the same way."""


class StoreFull(StoreError):
    """No room, and nothing that may be evicted. Nothing was stored; a retry is safe and may find room later.

    Attributes:
        wanted_bytes: what the value needs.
        capacity_bytes: all memory lent to the store.
        free_bytes: not used by anything.
        evictable_bytes: held by objects that nobody reads.
        leased_bytes: held by objects that are being read, until their leases end.
        reserved_bytes: promised to puts in progress.
    """

    def __init__(self, key: str, wanted_bytes: int, room: RoomNumbers) -> None:
        self.wanted_bytes = wanted_bytes
        self.capacity_bytes, self.free_bytes, self.evictable_bytes, self.leased_bytes, self.reserved_bytes = (
            room
        )
        if self.capacity_bytes == 0:
            remedy = "nobody lends memory: open at least one Store with lend_bytes"
        elif wanted_bytes > self.capacity_bytes:
            remedy = "lend more memory, the value is larger than the whole store"
        else:
            remedy = "retry later or lend more memory"
        super().__init__(
            f"no room for {key}: {wanted_bytes} bytes wanted, {self.free_bytes} free, {self.evictable_bytes} "
            f"evictable, {self.leased_bytes} being read, {self.reserved_bytes} promised to other puts, of "
            f"{self.capacity_bytes} in all; {remedy}"
        )


class PutFailed(StoreError):
    """The bytes could not be moved to where they should lie. Nothing is visible; a retry is safe."""


class MasterError(StoreError):
    """Something about the master."""


class MasterUnreachable(MasterError):
    """The master does not answer. The client keeps trying in the background; a retry is safe for every
    call.
    """


class MasterRefused(MasterError):
    """The master does not take the request, for instance because it speaks another version. Do not retry."""


class StoreClosed(StoreError):
    """The store (or the engine below it) has been closed on this side."""


# capacity, free, evictable, leased, reserved: as StoreFull names them.
RoomNumbers = tuple[int, int, int, int, int]
