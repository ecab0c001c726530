"""Exceptions of mooncake_store.

::

    StoreError
    ├─ ConfigError
    ├─ KeyInvalid
    ├─ KeyNotFound
    ├─ KeyExists
    ├─ ValueInvalid ─ SizeMismatch · TensorMismatch
    ├─ StoreFull
    ├─ QuotaExceeded
    ├─ OwnerUnreachable
    ├─ RateLimited
    ├─ PutFailed
    ├─ CopyFailed
    ├─ LeaseExpired
    ├─ EventMalformed
    ├─ PublisherClosed
    ├─ MasterError
    │  ├─ MasterUnreachable ─ MasterNotLeading · CoordinationUnavailable
    │  └─ MasterRefused ─ ProtocolMismatch · NotAuthorised
    ├─ TierError ─ TierUnavailable · TierInUse · TierKeyWrong · TierTimeout · TierFull · RecordInvalid
    └─ StoreClosed

Every message says what failed, on what, why, and what to do about it. What the transfer engine raises while
memory is lent (``MemoryUnavailable``) passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence


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


class TensorMismatch(ValueInvalid):
    """The value is no tensor, or one of another dtype, shape or cut than asked for. A retry fails the same
    way.
    """


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


class QuotaExceeded(StoreError):
    """The tenant may not store that much. Nothing was stored; removing values of the tenant is the remedy, or
    another ``TenantPolicy`` of the master.
    """


class OwnerUnreachable(StoreError):
    """An owner of memory does not answer, so that not all keys can be listed. A retry is safe."""


class RateLimited(StoreError):
    """The tenant has asked for more keys than its ``TenantPolicy`` at the master allows. Nothing was done.

    Attributes:
        retry_after_s: how long to wait before asking again.
    """

    def __init__(self, tenant: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"tenant {tenant!r} asks for more keys a second than the master lets it; wait "
            f"{retry_after_s:.3f} s, or raise its keys_per_s"
        )


class PutFailed(StoreError):
    """The bytes could not be moved to where they should lie. Nothing is visible; a retry is safe."""


class CopyFailed(StoreError):
    """A replica could not be made. What is there stays as it is; the message says why, and what may help."""


class LeaseExpired(StoreError):
    """A value was there, and was read for longer than its lease is known to have held: this process was
    stopped, or its master was exchanged meanwhile. What was read is void; a retry is safe. Calls that read a
    whole value have tried twice.

    Attributes:
        good: of a batch, per key, whether its value was read all the same; empty for single keys and buffers.
        expired: of a batch, the positions of the keys whose values were there and are not known to be right.
    """

    def __init__(self, message: str, good: Sequence[bool] = (), expired: Sequence[int] = ()) -> None:
        self.good, self.expired = list(good), list(expired)
        super().__init__(message)


class EventMalformed(StoreError):
    """A KV event is not what the wire format says. What it told is lost, so the sender's view has to be
    rebuilt.
    """


class PublisherClosed(StoreError):
    """The publisher of KV events has been closed; events can no longer be sent through it."""


class MasterError(StoreError):
    """Something about the master."""


class MasterUnreachable(MasterError):
    """The master does not answer. The client keeps trying in the background; a retry is safe for every
    call.
    """


class MasterNotLeading(MasterUnreachable):
    """This master of a cluster does not lead (any more); nothing was done. Clients look for the leader."""


class CoordinationUnavailable(MasterUnreachable):
    """What elects a cluster's leader does not answer, so the leader is not known. A retry is safe."""


class MasterRefused(MasterError):
    """The master does not take the request, for instance because it speaks another version. Do not retry."""


class ProtocolMismatch(MasterRefused):
    """Client and master have no version of the protocol in common. Upgrade the older side; masters first."""


class TierError(StoreError):
    """Something about a tier. Values in memory are not affected."""


class TierUnavailable(TierError):
    """The folder, bucket or server of a tier cannot be used as asked. Nothing was started."""


class TierInUse(TierUnavailable):
    """Another process has this tier open, and it takes only one."""


class TierKeyWrong(TierError):
    """What is in the tier was written with another secret, or with none. Nothing was changed."""


class TierTimeout(TierError):
    """The medium or server of a tier did not answer in time. A retry is safe."""


class TierFull(TierError):
    """A tier has no room for a value. Nothing was stored in it."""


class RecordInvalid(TierError):
    """What was found in a tier is no record that can be read. It counts as a miss."""


class NotAuthorised(MasterRefused):
    """The master's access rules do not let this client do that. Nothing was done; a retry fails the same
    way.
    """


class StoreClosed(StoreError):
    """The store (or the engine below it) has been closed on this side."""


# capacity, free, evictable, leased, reserved: as StoreFull names them.
RoomNumbers = tuple[int, int, int, int, int]
