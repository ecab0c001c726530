"""What a tier is to the store: a place for values that have left memory, or are about to."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "Bytes",
    "Gone",
    "Read",
    "ReadOutcome",
    "Record",
    "RecordMeta",
    "Stored",
    "Tier",
    "TierCounters",
    "TierRoom",
    "WriteOutcome",
]

Bytes = npt.NDArray[np.uint8]


class RecordMeta(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What is kept beside a value.

    Attributes:
        epoch, version: which value of its key it is; a pair that is never given twice, and the greater one is
            the younger one.
        tenant: whose key it is. Also decides by which key a value is encrypted.
        group: objects that belong together.
        priority: the higher, the longer it stays in memory.
        hard_pin: it never leaves memory by itself.
    """

    epoch: int = 0
    version: int = 0
    tenant: str = ""
    group: str = ""
    priority: int = 0
    hard_pin: bool = False


NO_META = RecordMeta()


@dataclass(frozen=True, slots=True)
class Record:
    """A value to be written. ``value`` is not changed by anybody until the call returns."""

    digest: bytes
    key: bytes
    value: Bytes
    meta: RecordMeta = NO_META


@dataclass(frozen=True, slots=True)
class Read:
    """A value to be read into memory of exactly its size. ``version``: (epoch, version), or None for any."""

    digest: bytes
    into: Bytes
    version: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A record that is there, by what its header says; the value itself is checked when it is read."""

    digest: bytes
    key: bytes
    nbytes: int
    meta: RecordMeta


class WriteOutcome(enum.Enum):
    """What became of one record. STORED: it is there, perhaps since before; SUPERSEDED: a younger version is
    there; FULL: no room could be made; FAILED: an error or the deadline.
    """

    STORED = "stored"
    SUPERSEDED = "superseded"
    FULL = "full"
    FAILED = "failed"


class ReadOutcome(enum.Enum):
    """What became of one read. Only with GOOD does the memory hold the value; else its content is undefined.

    MISS: not there, or in another version or size. CORRUPT: it was there, is not what was written, and is not
    given again. FAILED: an error or the deadline; it may be there.
    """

    GOOD = "good"
    MISS = "miss"
    CORRUPT = "corrupt"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TierRoom:
    """Bytes and records. ``capacity_bytes`` is 0 where nothing limits it."""

    capacity_bytes: int
    used_bytes: int
    records: int


@dataclass
class TierCounters:
    """What happened since the tier was opened. Numbers of records, except bytes.

    Attributes:
        written, written_bytes: values stored, as large as they are without headers.
        read, read_bytes: good reads.
        missed: reads of what was not there.
        corrupt: reads that found something else than what was written; that record is not given again, and
            kept aside where it is a file or an object of its own.
        failed: reads and writes that ended in an error.
        timed_out: reads and writes that did not end before their deadline.
        full: writes for which there was no room.
        retired: records that left to make room.
        dropped: records that were removed by request.
        adopted: records found when the tier was opened.
        damaged: places where there should have been a record and was none, found then.
        foreign: files or objects there that are not the tier's; they are left alone.
    """

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    missed: int = 0
    corrupt: int = 0
    failed: int = 0
    timed_out: int = 0
    full: int = 0
    retired: int = 0
    dropped: int = 0
    adopted: int = 0
    damaged: int = 0
    foreign: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        """Count. Thread-safe."""
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)


# Digests and versions of records that left without having been dropped.
Gone = Callable[[list[tuple[bytes, tuple[int, int]]]], None]


class Tier(Protocol):
    """A store of records. Thread-safe; every call ends by its deadline, in the worst case with FAILED.

    A tier is a cache: it may lose records, never mix them up. A value comes back as it was written, or not at
    all. ``mooncake_store.testing.TierContract`` tests what is said here.

    Attributes:
        id: its lasting name: the same after it was opened again, and for all who share it.
        name: what messages call it.
        shared: whether other processes write to and read from it too.
        counters: what happened.
        on_gone: told of records that left by themselves (made room, corrupt), from any thread; may be None.
    """

    id: str
    name: str
    shared: bool
    counters: TierCounters
    on_gone: Gone | None

    def lend_memory(self, memory: Bytes) -> None:
        """Say that values will often be written from and read into this memory, which stays until
        :meth:`close`. May make them faster; changes nothing else.
        """

    def write(self, records: Sequence[Record], timeout_s: float) -> list[WriteOutcome]:
        """Store records, and make room for them. They shall be read together: one batch, one place."""

    def read(self, reads: Sequence[Read], timeout_s: float) -> list[ReadOutcome]:
        """Read values. What is found damaged is a miss from then on."""

    def find(self, digests: Sequence[bytes], timeout_s: float) -> list[Stored | None]:
        """What is there, without its value."""

    def drop(self, items: Sequence[tuple[bytes, tuple[int, int] | None]], timeout_s: float) -> list[bool]:
        """Remove records, of a version or whichever there is; True where one was.

        They are not found at a later opening either.
        """

    def adopt(self, timeout_s: float) -> Iterator[Stored]:
        """All that is there. Raises TierTimeout when listing takes longer."""

    def room(self) -> TierRoom:
        """How much is in it."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Let go of files, connections and memory. Records stay. Safe to call twice."""
