"""A tier over whatever keeps objects."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np

from mooncake_store._errors import RecordInvalid, StoreClosed, TierFull, TierTimeout
from mooncake_store.tiers.cipher import Secret
from mooncake_store.tiers.codec import BLOCK_BYTES, NOWHERE, Codec, Header, decode_header, header_size
from mooncake_store.tiers.contract import (
    Bytes,
    Gone,
    Read,
    ReadOutcome,
    Record,
    Stored,
    TierCounters,
    TierRoom,
    WriteOutcome,
)
from mooncake_store.tiers.objects.place import ObjectPlace
from mooncake_store.tiers.workers import Workers

__all__ = ["ObjectTier"]

LISTED_AT_ONCE = 256
# More than the largest header, which has a key of 64 KiB.
HEADER_ROOM = 1 << 17

T = TypeVar("T")
log = logging.getLogger(__name__)


class ObjectTier:
    """See :class:`Tier`. Each record is one object, named by its digest, and made and replaced as a whole.

    Several processes may share it. Two that write the same key at once may leave either value; who reads says
    which version it wants.
    """

    shared = True

    def __init__(
        self,
        id: str,
        name: str,
        place: ObjectPlace,
        secret: Secret | None,
        workers: int,
        on_gone: Gone | None,
    ) -> None:
        self.id = id
        self.name = name
        self.counters = TierCounters()
        self.on_gone = on_gone
        self._place = place
        self._codec = Codec(secret)
        self._workers = Workers(workers, "mooncake-store-tier")
        self._closed = False

    def lend_memory(self, memory: Bytes) -> None:
        """Nothing to do: what arrives too late must not reach it, so values arrive elsewhere first."""

    def write(self, records: Sequence[Record], timeout_s: float) -> list[WriteOutcome]:
        """See :class:`Tier`."""
        found = self._all(self._write_one, records, timeout_s)
        return [self._judged(one, WriteOutcome.FAILED, "written") for one in found]

    def _write_one(self, record: Record) -> WriteOutcome:
        name = record.digest.hex()
        before = self._header(name)
        ours = (record.meta.epoch, record.meta.version)
        if before is not None and (before.epoch, before.version) >= ours:
            same = (before.epoch, before.version) == ours
            return WriteOutcome.STORED if same else WriteOutcome.SUPERSEDED
        room = np.empty(self._codec.stored_bytes(record.value.nbytes) if self._codec.copies else 0, np.uint8)
        header, stored = self._codec.seal(record, NOWHERE, 0, room)
        try:
            self._place.put(name, [np.frombuffer(header, np.uint8), stored])
        except TierFull as error:
            log.warning("%s: %s", self.name, error)
            self.counters.add(full=1)
            return WriteOutcome.FULL
        self.counters.add(written=1, written_bytes=record.value.nbytes)
        return WriteOutcome.STORED

    def read(self, reads: Sequence[Read], timeout_s: float) -> list[ReadOutcome]:
        """See :class:`Tier`."""
        found = self._all(self._read_one, reads, timeout_s)
        outcomes = []
        for read, one in zip(reads, found, strict=True):
            if isinstance(one, np.ndarray):
                # Only here: a thread that is late has nothing of the caller's.
                read.into[:] = one
                self.counters.add(read=1, read_bytes=read.into.nbytes)
                outcomes.append(ReadOutcome.GOOD)
            else:
                outcomes.append(self._judged(one, ReadOutcome.FAILED, "read"))
        return outcomes

    def _read_one(self, read: Read) -> Bytes | ReadOutcome:
        name = read.digest.hex()
        data = self._place.get(name, read.into.nbytes + HEADER_ROOM)
        if data is None:
            self.counters.add(missed=1)
            return ReadOutcome.MISS
        try:
            header = self._decoded(name, data)
            stored = self._codec.stored(header)
        except RecordInvalid as error:
            return self._corrupt(name, read.digest, read.version, str(error))
        version = (header.epoch, header.version)
        if header.value_bytes != read.into.nbytes or read.version not in (None, version):
            self.counters.add(missed=1)
            return ReadOutcome.MISS
        payload = data[header.nbytes : header.nbytes + header.stored_bytes]
        into = np.empty(header.value_bytes, np.uint8) if header.encrypted else payload
        if not self._codec.open(header, stored.meta.tenant, payload, into):
            return self._corrupt(name, read.digest, version, "its checksum does not match")
        return into

    def _corrupt(self, name: str, digest: bytes, version: tuple[int, int] | None, why: str) -> ReadOutcome:
        """``version``: its own, or where it does not say the one that was asked for."""
        log.error("%s: %s is damaged: %s", self.name, name, why)
        self.counters.add(corrupt=1)
        self._place.quarantine(name)
        if self.on_gone is not None and version is not None:
            self.on_gone([(digest, version)])
        return ReadOutcome.CORRUPT

    def find(self, digests: Sequence[bytes], timeout_s: float) -> list[Stored | None]:
        """See :class:`Tier`."""
        found = self._all(lambda digest: self._stored(digest.hex()), digests, timeout_s)
        return [one if isinstance(one, Stored) else self._judged(one, None, "found") for one in found]

    def drop(self, items: Sequence[tuple[bytes, tuple[int, int] | None]], timeout_s: float) -> list[bool]:
        """See :class:`Tier`."""
        found = self._all(self._drop_one, items, timeout_s)
        return [bool(self._judged(one, False, "dropped")) for one in found]

    def _drop_one(self, item: tuple[bytes, tuple[int, int] | None]) -> bool:
        digest, version = item
        if version is not None:
            header = self._header(digest.hex())
            if header is None or (header.epoch, header.version) != version:
                return False
        there = self._place.delete(digest.hex())
        self.counters.add(dropped=there)
        return there

    def adopt(self, timeout_s: float) -> Iterator[Stored]:
        """See :class:`Tier`. Lists all objects and reads the beginning of each."""
        self._require_open()
        deadline_s = time.monotonic() + timeout_s
        names = self._place.names()
        while True:
            left_s = deadline_s - time.monotonic()
            (listed,) = self._workers.run_all([lambda: list(islice(names, LISTED_AT_ONCE))], left_s)
            if isinstance(listed, Exception):
                raise TierTimeout(f"{self.name} cannot be listed: {listed}") from listed
            if not listed:
                return
            for one in self._all(self._stored, listed, deadline_s - time.monotonic()):
                if isinstance(one, Stored):
                    self.counters.add(adopted=1)
                    yield one
                elif isinstance(one, TierTimeout):
                    raise TierTimeout(f"{self.name} was not looked through in time") from one
                elif one is not None:
                    self.counters.add(damaged=1)

    def room(self) -> TierRoom:
        """See :class:`Tier`."""
        return self._place.room()

    def close(self, timeout_s: float = 5.0) -> None:
        """See :class:`Tier`."""
        if not self._closed:
            self._closed = True
            self._workers.close(timeout_s)
            self._place.close()

    def _header(self, name: str) -> Header | None:
        data = self._place.head(name, BLOCK_BYTES)
        if data is None:
            return None
        size = header_size(data.data)
        if size > BLOCK_BYTES:
            data = self._place.head(name, size)
        try:
            return None if data is None else self._decoded(name, data)
        except RecordInvalid:
            return None  # whatever it is, it is replaced or not found

    def _stored(self, name: str) -> Stored | None:
        header = self._header(name)
        return None if header is None else self._codec.stored(header)

    @staticmethod
    def _decoded(name: str, data: Bytes) -> Header:
        header = decode_header(data.data)
        if header.digest.hex() != name or header.place != NOWHERE or header.dropped:
            raise RecordInvalid(f"it is a record of {header.digest.hex()}")
        return header

    def _all(self, call: Callable[[T], object], items: Sequence[T], timeout_s: float) -> list[object]:
        self._require_open()
        return list(self._workers.run_all([partial(call, item) for item in items], timeout_s))

    def _judged(self, found: object, failed: T, done: str) -> T:
        if not isinstance(found, Exception):
            return found  # type: ignore[return-value]  # what the call gives, which the caller knows
        log.warning("%s: a record was not %s: %s", self.name, done, found)
        self.counters.add(**{"timed_out" if isinstance(found, TierTimeout) else "failed": 1})
        return failed

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.name} has been closed")
