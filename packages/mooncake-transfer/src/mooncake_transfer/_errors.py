"""Exceptions of mooncake_transfer.

::

    TransferError
    ├─ ConfigError
    ├─ PeerError     ─ PeerUnreachable · PeerRestarted · PeerIncompatible · PeerUntrusted
    │                  · CallTimeout · RemoteError
    ├─ RegionError   ─ RegionUnknown · RegionRefused · RegionBusy · RegionClosed · RegionOverlap
    ├─ DriverError   ─ DriverUnavailable · NoRoute
    ├─ RegistryError ─ RegistryUnavailable · NameUnknown
    ├─ MemoryUnavailable ─ PoolExhausted
    ├─ TransferTimeout ─ MemoryInUse
    ├─ TransferCancelled
    ├─ IntegrityError
    └─ EngineClosed  ─ EngineForked

Every message says what failed, on what, why, and what to do about it.
"""

from __future__ import annotations


class TransferError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TransferError, ValueError):
    """An option or argument has a value that cannot work; nothing was started."""


class PeerError(TransferError):
    """Something about the other side."""


class PeerUnreachable(PeerError):
    """The peer cannot be reached or went away. Reads and writes of the same bytes are safe to retry."""


class PeerRestarted(PeerError):
    """Another process answers where the peer was. What was learnt from the old one is void; fetch it anew."""


class PeerIncompatible(PeerError):
    """The peer's version of the protocol is another one. A retry fails too."""


class PeerUntrusted(PeerError):
    """One side's certificate does not do for the other, or only one of them uses TLS. A retry fails too."""


class CallTimeout(PeerError, TimeoutError):
    """The peer is connected and did not answer, or take a message, in time; its handler may run all the same.

    Whether a retry is safe is the method's own promise.
    """


class RemoteError(PeerError):
    """The peer's handler raised. Whether a retry is safe is the method's own promise.

    Attributes:
        kind: class name of the exception on the other side, for example ``"KeyError"``.
        message: its text.
    """

    def __init__(self, kind: str, message: str, where: str = "") -> None:
        self.kind = kind
        self.message = message
        super().__init__(f"{where + ': ' if where else ''}{kind}: {message}")


class RegionError(TransferError):
    """Something about registered memory."""


class RegionUnknown(RegionError):
    """The peer has no such region (any more)."""


class RegionRefused(RegionError):
    """The target refused: wrong access key, revoked region, or a range outside it. A retry fails too."""


class RegionBusy(RegionError):
    """The deadline for giving the region back has passed and transfers still use it. Close it again later.

    The message names one of this engine's transfers; or what the driver knows of the peers that still use the
    memory: with tcp the address of one, with shm its process, and how many there are.
    """


class RegionClosed(RegionError):
    """The region was closed on this side."""


class RegionOverlap(RegionError):
    """The memory overlaps a registered region in part. Equal and nested ranges are fine."""


class DriverError(TransferError):
    """Something about a driver."""


class DriverUnavailable(DriverError):
    """A driver that was asked for cannot be used here; the message has its reason and remedy."""


class NoRoute(DriverError):
    """No driver reaches the peer for this pair of regions; the message lists what each one said."""


class RegistryError(TransferError):
    """Something about looking up names. Peers that are connected are not affected."""


class RegistryUnavailable(RegistryError):
    """The registry did not answer, or refused. A retry is safe; names come back by themselves."""


class NameUnknown(RegistryError):
    """The registry answers, and nobody has announced that name. A retry is safe."""


class MemoryUnavailable(TransferError, MemoryError):
    """The memory asked for is not to be had on this machine. Nothing was allocated."""


class PoolExhausted(MemoryUnavailable, TimeoutError):
    """No buffer came free in time; the message says who holds how much. A retry is safe."""


class TransferTimeout(TransferError, TimeoutError):
    """The deadline passed. The transfer was cancelled; bytes may have been moved in part."""


class MemoryInUse(TransferTimeout):
    """The deadline passed, and a driver cannot be made to let go: it may read or write the memory still.

    Neither free the memory nor use it for anything else before another ``wait()`` has ended otherwise. Who
    retries does so with other memory.
    """


class TransferCancelled(TransferError):
    """The transfer was cancelled; bytes may have been moved in part."""


class IntegrityError(TransferError):
    """Bytes at the two ends differ, after they were moved again several times: something on the way lies.

    Or they could not be compared, for a reason that the message has and no other class stands for.
    """


class EngineClosed(TransferError):
    """The engine has been closed."""


class EngineForked(EngineClosed):
    """The engine belongs to the process that this one was forked from; make a new one here."""
