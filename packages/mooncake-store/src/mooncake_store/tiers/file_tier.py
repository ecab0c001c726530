"""Records in files of this machine: many in one file, written once, which goes as a whole."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from mooncake_store._errors import ConfigError, RecordInvalid, StoreClosed, TierTimeout
from mooncake_store.tiers.buckets import NAME, NO_ROOM, Bucket, Buckets, Entry
from mooncake_store.tiers.cipher import Secret
from mooncake_store.tiers.codec import BLOCK_BYTES, Codec
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
from mooncake_store.tiers.file_windows import IN_FLIGHT_BYTES, Placed, ReadWindow, WriteWindow, windows
from mooncake_store.tiers.files import Files, open_files
from mooncake_store.tiers.files.access import Piece
from mooncake_store.tiers.folder import IDENTITY_FILE, LOCK_FILE, lock_folder, prepare_folder
from mooncake_store.tiers.scan import Scan, scan
from mooncake_store.tiers.workers import Workers

__all__ = ["FileTier"]

BUCKET_BYTES = 256 << 20
MIN_BUCKETS = 4
SCAN_THREADS = 8
CHECK_THREADS = 4
TOMBSTONE_TIMEOUT_S = 5.0
# A read may fail for a reason that passes; a record of which every read fails is none.
FAILED_READS = 3

log = logging.getLogger(__name__)


class FileTier:
    """A folder of this machine as a tier. See :class:`Tier`; one process at a time.

    Deadlines hold for reading and writing; making, opening and deleting files is left to the file system.
    """

    shared = False

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        bucket_bytes: int | None = None,
        secret: Secret | None = None,
        io: str = "auto",
        direct: bool = True,
        in_flight: int = 64,
        durable: bool = False,
        open_timeout_s: float = 60.0,
        on_gone: Gone | None = None,
    ) -> None:
        """Open it, and find what is there.

        Args:
            folder: made when it is not there.
            capacity_bytes: how much room its files may take.
            bucket_bytes: size of a file; the smaller, the less goes at once. None: 256 MiB, or less where the
                capacity is small.
            secret: encrypts what is written.
            io: ``driver``: the nvmeof driver, which has to be installed; ``threads``; ``auto``: what works.
            direct: past the page cache, where the file system can do that.
            in_flight: operations under way at a time.
            durable: a write is done once it is on the medium. Else records of the last seconds before a loss
                of power may be missing; none is wrong.
            open_timeout_s: how long finding what is there may take.

        Raises ConfigError, TierUnavailable, TierInUse, TierKeyWrong, TierTimeout.
        """
        bucket_bytes = _bucket_bytes(capacity_bytes, bucket_bytes)
        self.counters = TierCounters()
        self.on_gone = on_gone
        self._folder = Path(folder)
        self.name = f"file tier {self._folder}"
        self._codec = Codec(secret)
        self._durable = durable
        self._closed = False
        self._checkers = Workers(CHECK_THREADS, "mooncake-store-tier-check")
        self._index: dict[bytes, Entry] = {}
        self._failed_reads: dict[bytes, int] = {}  # in a row, of what is in the index
        self.id = prepare_folder(self._folder, "file", secret).id
        self._lock_fd = lock_folder(self._folder)
        try:
            self._files: Files = open_files(io, direct=direct, in_flight=in_flight)
            self._buckets = Buckets(self._folder, self._files, capacity_bytes, bucket_bytes)
            self._find_all(open_timeout_s)
        except BaseException:
            self.close()
            raise

    # ---- what is there when it is opened

    def _find_all(self, timeout_s: float) -> None:
        buckets = []
        for path in sorted(self._folder.iterdir()):
            name = NAME.fullmatch(path.name)
            if name is not None and path.is_file():
                bucket = Bucket(path, bytes.fromhex(name[2]), path.stat().st_size)
                buckets.append((bucket, int(name[1], 16)))
            elif path.name not in (IDENTITY_FILE, LOCK_FILE) and not path.name.endswith(".part"):
                self.counters.add(foreign=1)
        workers = Workers(SCAN_THREADS, "mooncake-store-tier-scan")
        try:
            calls = [lambda bucket=bucket: scan(bucket.path, bucket.place) for bucket, _ in buckets]
            scans = workers.run_all(calls, timeout_s)
        finally:
            workers.close(0.1)
        for (bucket, sequence), found in zip(buckets, scans, strict=True):
            self._buckets.add_found(bucket, sequence)
            if isinstance(found, TierTimeout):
                raise TierTimeout(
                    f"{self._folder} could not be looked through within {timeout_s:g} s: {found}; give a "
                    "larger open_timeout_s"
                )
            if isinstance(found, Exception):
                log.warning("%s cannot be read, and is left alone: %s", bucket.path, found)
                self.counters.add(damaged=1)
            else:
                self._adopt_bucket(bucket, found)
        self._forget(self._buckets.shrink())
        self.counters.adopted = len(self._index)
        if self.counters.damaged:
            log.warning("%s has %d damaged places", self._folder, self.counters.damaged)

    def _adopt_bucket(self, bucket: Bucket, found: Scan) -> None:
        self.counters.add(damaged=found.damaged)
        superseded = []
        for header in found.headers:
            try:
                entry = Entry(bucket, header, self._codec.stored(header))
            except RecordInvalid as error:
                log.warning("%s: %s", bucket.path, error)
                self.counters.add(damaged=1)
                continue
            superseded += self._insert(entry)
        with self._buckets.lock:
            bucket.used = found.end
            bucket.sealed = False  # it may still have the room that was set aside for it
            self._buckets.seal(bucket)
        self._bury(superseded)

    # ---- writing

    def write(self, records: Sequence[Record], timeout_s: float) -> list[WriteOutcome]:
        """See :class:`Tier`."""
        self._require_open()
        deadline_s = time.monotonic() + timeout_s
        outcomes = [WriteOutcome.FAILED] * len(records)
        placed = self._place(records, outcomes)
        under_way: deque[WriteWindow] = deque()
        in_flight = 0
        for window in windows(placed, lambda one: one.span, lambda one: one.bucket):
            while under_way and in_flight + window.nbytes > IN_FLIGHT_BYTES:
                in_flight -= self._end_write(under_way.popleft(), outcomes, deadline_s)
            begun = WriteWindow(window.items, window.nbytes, self._buckets, self._files, self._codec)
            in_flight += begun.nbytes
            under_way.append(begun)
        while under_way:
            self._end_write(under_way.popleft(), outcomes, deadline_s)
        return outcomes

    def _place(self, records: Sequence[Record], outcomes: list[WriteOutcome]) -> list[Placed]:
        placed: list[Placed] = []
        spans = []
        for record in records:
            stored = self._codec.stored_bytes(record.value.nbytes)
            spans.append(self._codec.header_bytes(record) + -(-stored // BLOCK_BYTES) * BLOCK_BYTES)
        left = sum(spans)
        for at, (record, span) in enumerate(zip(records, spans, strict=True)):
            wanted = self._wanted(record)
            if wanted is None:
                found = self._room_for(span, left)
                outcomes[at] = WriteOutcome.FULL
                if found is not None:
                    outcomes[at] = WriteOutcome.FAILED
                    placed.append(Placed(at, record, found[0], found[1], span))
            else:
                outcomes[at] = wanted
            left -= span
        self.counters.add(full=sum(outcome is WriteOutcome.FULL for outcome in outcomes))
        return placed

    def _wanted(self, record: Record) -> WriteOutcome | None:
        with self._buckets.lock:
            entry = self._index.get(record.digest)
        ours = (record.meta.epoch, record.meta.version)
        if entry is None or entry.version < ours:
            return None
        return WriteOutcome.STORED if entry.version == ours else WriteOutcome.SUPERSEDED

    def _room_for(self, span: int, batch_bytes: int) -> tuple[Bucket, int] | None:
        try:
            found = self._buckets.take(span, batch_bytes)
        except OSError as error:
            log.warning("%s: no bucket can be made: %s", self.name, error)
            return None
        if found is None:
            return None
        bucket, offset, gone = found
        self._forget(gone)
        return bucket, offset

    def _end_write(self, window: WriteWindow, outcomes: list[WriteOutcome], deadline_s: float) -> int:
        failure = window.wait(deadline_s, durable=self._durable)
        superseded: list[Entry] = []
        if failure is None:
            for one, header in zip(window.items, window.headers, strict=True):
                entry = Entry(one.bucket, header, self._codec.stored(header))
                superseded += self._insert(entry)
                outcomes[one.at] = WriteOutcome.STORED
                self.counters.add(written=1, written_bytes=header.value_bytes)
        else:
            outcome = self._write_failed(window, failure)
            for one in window.items:
                outcomes[one.at] = outcome
        window.end()
        self._bury(superseded)
        return window.nbytes

    def _write_failed(self, window: WriteWindow, failure: Exception) -> WriteOutcome:
        """Nothing more goes into this bucket, where an old value might still arrive late."""
        log.warning("%s: %d records were not written: %s", self.name, len(window.items), failure)
        with self._buckets.lock:
            self._buckets.seal(window.bucket)
        if isinstance(failure, TierTimeout):
            self.counters.add(timed_out=len(window.items))
            return WriteOutcome.FAILED
        if getattr(failure, "errno", None) in NO_ROOM or self._is_disk_full(window.nbytes):
            self.counters.add(full=len(window.items))
            return WriteOutcome.FULL
        self.counters.add(failed=len(window.items))
        return WriteOutcome.FAILED

    def _is_disk_full(self, nbytes: int) -> bool:
        try:
            status = os.statvfs(self._folder)
        except OSError:
            return False
        return status.f_bavail * status.f_frsize < nbytes

    def _insert(self, entry: Entry) -> list[Entry]:
        """Have it found from now on; what is to be buried instead."""
        digest = entry.header.digest
        with self._buckets.lock:
            if entry.bucket.gone:
                return []
            before = self._index.get(digest)
            if before is not None:
                if before.version >= entry.version:
                    return [entry]
                before.bucket.records.pop(digest, None)
            self._index[digest] = entry
            entry.bucket.records[digest] = entry
            return [] if before is None else [before]

    # ---- reading

    def read(self, reads: Sequence[Read], timeout_s: float) -> list[ReadOutcome]:
        """See :class:`Tier`."""
        self._require_open()
        deadline_s = time.monotonic() + timeout_s
        outcomes = [ReadOutcome.MISS] * len(reads)
        wanted: list[tuple[int, Entry, Bytes]] = []
        with self._buckets.lock:
            for at, read in enumerate(reads):
                entry = self._index.get(read.digest)
                if entry is None or entry.header.value_bytes != read.into.nbytes:
                    continue
                if read.version is not None and entry.version != read.version:
                    continue
                wanted.append((at, entry, read.into))
                self._buckets.touch(entry.bucket)
        self.counters.add(missed=len(reads) - len(wanted))
        # As they lie: reads of neighbours become one.
        wanted.sort(key=lambda one: (one[1].bucket.path.name, one[1].header.offset))
        self._read_all(wanted, outcomes, deadline_s)
        return outcomes

    def _read_all(
        self, wanted: list[tuple[int, Entry, Bytes]], outcomes: list[ReadOutcome], deadline_s: float
    ) -> None:
        """Window by window. Other threads check what has arrived, while this one waits for the rest."""
        under_way: deque[ReadWindow] = deque()
        checks: list[tuple[ReadWindow, Future[list[bool]]]] = []
        in_flight = 0
        for window in windows(wanted, lambda one: one[1].header.span, lambda one: one[1].bucket):
            while under_way and in_flight + window.nbytes > IN_FLIGHT_BYTES:
                in_flight -= self._arrived(under_way.popleft(), outcomes, checks, deadline_s)
            begun = ReadWindow(window.items, window.nbytes, self._buckets, self._files, self._codec)
            in_flight += begun.nbytes
            under_way.append(begun)
        while under_way:
            self._arrived(under_way.popleft(), outcomes, checks, deadline_s)
        for moved, check in checks:
            for item, good in zip(moved.items, check.result(), strict=True):
                outcomes[item[0]] = self._checked(good, item[1])
            moved.end()

    def _arrived(
        self,
        window: ReadWindow,
        outcomes: list[ReadOutcome],
        checks: list[tuple[ReadWindow, Future[list[bool]]]],
        deadline_s: float,
    ) -> int:
        failure = window.wait(deadline_s)
        if failure is None:
            checks.append((window, self._checkers.submit(window.check)))
            return window.nbytes
        window.end()
        if isinstance(failure, OSError) and len(window.items) > 1:
            # One of them cannot be read, and the others can.
            for item in window.items:
                alone = ReadWindow([item], 0, self._buckets, self._files, self._codec)
                self._arrived(alone, outcomes, checks, deadline_s)
            return window.nbytes
        log.warning("%s: %d records cannot be read: %s", self.name, len(window.items), failure)
        for at, entry, _ in window.items:
            outcomes[at] = ReadOutcome.MISS if entry.bucket.gone else ReadOutcome.FAILED
            if isinstance(failure, OSError) and not entry.bucket.gone:
                self._read_failed(entry)
        if isinstance(failure, TierTimeout):
            self.counters.add(timed_out=len(window.items))
        else:
            self.counters.add(failed=len(window.items))
        return window.nbytes

    def _read_failed(self, entry: Entry) -> None:
        digest = entry.header.digest
        with self._buckets.lock:
            failures = self._failed_reads[digest] = self._failed_reads.get(digest, 0) + 1
        if failures < FAILED_READS:
            return
        log.error("%s: %s cannot be read at %d", self.name, entry.bucket.path, entry.header.offset)
        if self._take_out(entry):
            self.counters.add(corrupt=1)
            self._tell_gone([entry])
            self._bury([entry])

    def _checked(self, good: bool, entry: Entry) -> ReadOutcome:
        if self._failed_reads:
            with self._buckets.lock:
                self._failed_reads.pop(entry.header.digest, None)
        if good:
            self.counters.add(read=1, read_bytes=entry.header.value_bytes)
            return ReadOutcome.GOOD
        log.error("%s: the record at %d of %s is damaged", self.name, entry.header.offset, entry.bucket.path)
        self.counters.add(corrupt=1)
        if self._take_out(entry):
            self._tell_gone([entry])
            self._bury([entry])
        return ReadOutcome.CORRUPT

    # ---- the rest

    def find(self, digests: Sequence[bytes], timeout_s: float) -> list[Stored | None]:
        """See :class:`Tier`."""
        self._require_open()
        with self._buckets.lock:
            found = [self._index.get(digest) for digest in digests]
        return [None if entry is None else entry.stored for entry in found]

    def drop(self, items: Sequence[tuple[bytes, tuple[int, int] | None]], timeout_s: float) -> list[bool]:
        """See :class:`Tier`."""
        self._require_open()
        dropped, entries = [], []
        for digest, version in items:
            with self._buckets.lock:
                entry = self._index.get(digest)
            there = entry is not None and version in (None, entry.version) and self._take_out(entry)
            dropped.append(there)
            if there and entry is not None:
                entries.append(entry)
        self.counters.add(dropped=len(entries))
        self._bury(entries, timeout_s)
        return dropped

    def adopt(self, timeout_s: float) -> Iterator[Stored]:
        """See :class:`Tier`. What was found when it was opened, and what came since."""
        self._require_open()
        with self._buckets.lock:
            entries = list(self._index.values())
        return iter([entry.stored for entry in entries])

    def room(self) -> TierRoom:
        """See :class:`Tier`. Room that is set aside for the file being filled is taken."""
        with self._buckets.lock:
            return TierRoom(self._buckets.capacity_bytes, self._buckets.used_bytes, len(self._index))

    def lend_memory(self, memory: Bytes) -> None:
        """See :class:`Tier`."""
        self._files.lend_memory(memory)

    def close(self, timeout_s: float = 5.0) -> None:
        """See :class:`Tier`."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_buckets"):
            self._buckets.close()
        if hasattr(self, "_files"):
            self._files.close(timeout_s)
        self._checkers.close(timeout_s)
        os.close(self._lock_fd)

    def _take_out(self, entry: Entry) -> bool:
        with self._buckets.lock:
            if self._index.get(entry.header.digest) is not entry:
                return False
            del self._index[entry.header.digest]
            self._failed_reads.pop(entry.header.digest, None)
            entry.bucket.records.pop(entry.header.digest, None)
            return True

    def _forget(self, gone: list[Entry]) -> None:
        """The buckets of these records have gone."""
        taken = []
        with self._buckets.lock:
            for entry in gone:
                if self._index.get(entry.header.digest) is entry:
                    del self._index[entry.header.digest]
                    self._failed_reads.pop(entry.header.digest, None)
                    taken.append(entry)
        self.counters.add(retired=len(taken))
        self._tell_gone(taken)

    def _tell_gone(self, entries: list[Entry]) -> None:
        if entries and self.on_gone is not None:
            self.on_gone([(entry.header.digest, entry.version) for entry in entries])

    def _bury(self, entries: list[Entry], timeout_s: float = TOMBSTONE_TIMEOUT_S) -> None:
        """Have records not found at the next opening either."""
        deadline_s = time.monotonic() + timeout_s
        for entry in entries:
            bucket = entry.bucket
            if bucket.gone:
                continue
            try:
                with self._buckets.opened(bucket) as file, self._files.scratch(BLOCK_BYTES) as block:
                    block[:] = memoryview(self._codec.tombstone(entry.header))
                    file.start([Piece(entry.header.offset, block)], write=True).wait(deadline_s)
            except (OSError, TierTimeout) as error:
                # It must not come back: rather all of its bucket goes.
                log.warning("%s goes, a record in it could not be removed: %s", bucket.path, error)
                with self._buckets.lock:
                    gone = self._buckets.remove(bucket)
                self._forget(gone)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.name} has been closed")


def _bucket_bytes(capacity_bytes: int, bucket_bytes: int | None) -> int:
    least = MIN_BUCKETS * BLOCK_BYTES
    if capacity_bytes < least:
        raise ConfigError(f"capacity_bytes of a file tier is {capacity_bytes}; it must be at least {least}")
    most = capacity_bytes // MIN_BUCKETS // BLOCK_BYTES * BLOCK_BYTES
    if bucket_bytes is None:
        return min(BUCKET_BYTES, most)
    if not BLOCK_BYTES <= bucket_bytes <= most:
        raise ConfigError(
            f"bucket_bytes is {bucket_bytes}; it must be between {BLOCK_BYTES} and a quarter of "
            f"capacity_bytes, {most}"
        )
    return -(-bucket_bytes // BLOCK_BYTES) * BLOCK_BYTES
