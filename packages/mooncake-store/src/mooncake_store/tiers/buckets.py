"""The buckets of a file tier: which there are, how much room they take, and which one goes next."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_store.tiers.codec import Header
from mooncake_store.tiers.contract import Stored
from mooncake_store.tiers.files import Files, OpenFile

__all__ = ["Bucket", "Buckets", "Entry"]

NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})\.bucket")
MAX_OPEN = 128
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One record: where it is and what its header says."""

    bucket: Bucket
    header: Header
    stored: Stored

    @property
    def version(self) -> tuple[int, int]:
        """As :class:`Read` names it."""
        return self.header.epoch, self.header.version


@dataclass(eq=False, slots=True)
class Bucket:
    """A file that is filled once, from its beginning, and goes as a whole.

    Attributes:
        place: its random name, which every record in it carries.
        nbytes: how much room the file takes.
        used: where the next record goes.
        records: those that can be found, by digest.
    """

    path: Path
    place: bytes
    nbytes: int
    used: int = 0
    sealed: bool = False
    gone: bool = False
    users: int = 0
    file: OpenFile | None = None
    opening: threading.Lock = field(default_factory=threading.Lock)
    records: dict[bytes, Entry] = field(default_factory=dict)


class Buckets:
    """All buckets of one folder. Its lock is the tier's; methods that say so are called with it held."""

    def __init__(self, folder: Path, files: Files, capacity_bytes: int, bucket_bytes: int) -> None:
        self.lock = threading.RLock()
        self._folder = folder
        self._files = files
        self.capacity_bytes = capacity_bytes
        self._bucket_bytes = bucket_bytes
        self._all: OrderedDict[bytes, Bucket] = OrderedDict()  # least recently used first
        self._filling: Bucket | None = None
        self._sequence = 0
        self.used_bytes = 0

    def add_found(self, bucket: Bucket, sequence: int) -> None:
        """A bucket of an earlier life, younger than those added before."""
        with self.lock:
            bucket.sealed = True
            self._all[bucket.place] = bucket
            self.used_bytes += bucket.nbytes
            self._sequence = max(self._sequence, sequence)

    def touch(self, bucket: Bucket) -> None:
        """Something in it was read. With the lock."""
        if not bucket.gone:
            self._all.move_to_end(bucket.place)

    def take(self, nbytes: int, batch_bytes: int) -> tuple[Bucket, int, list[Entry]] | None:
        """Room for a record of a batch that still needs ``batch_bytes``: bucket, offset, and what had to go.

        None when there is none.
        """
        with self.lock:
            gone: list[Entry] = []
            filling = self._filling
            if filling is not None:
                left = filling.nbytes - filling.used
                # A batch stays together: it is read together, and goes together.
                if left < nbytes or (left < batch_bytes <= self._bucket_bytes):
                    self.seal(filling)
                    filling = None
            if filling is None:
                made = self._make(max(self._bucket_bytes, nbytes))
                if made is None:
                    return None
                filling, gone = made
                self._filling = filling
            offset = filling.used
            filling.used += nbytes
            self.touch(filling)
            return filling, offset, gone

    def _make(self, nbytes: int) -> tuple[Bucket, list[Entry]] | None:
        gone = self._retire(self.used_bytes + nbytes - self.capacity_bytes)
        if self.used_bytes + nbytes > self.capacity_bytes:
            return None
        try:
            return self._create(nbytes), gone
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("no room for a bucket of %d bytes in %s: %s", nbytes, self._folder, error.strerror)
        # Somebody else fills the file system. What goes here makes room for one bucket; if that is taken too,
        # nothing more is given up.
        gone += self._retire(nbytes)
        try:
            return self._create(nbytes), gone
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        return None

    def _create(self, nbytes: int) -> Bucket:
        self._sequence += 1
        place = secrets.token_bytes(16)
        path = self._folder / f"{self._sequence:016x}-{place.hex()}.bucket"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        bucket = Bucket(path, place, nbytes)
        self._all[place] = bucket
        self.used_bytes += nbytes
        return bucket

    def _retire(self, nbytes: int) -> list[Entry]:
        gone: list[Entry] = []
        while nbytes > 0 and (oldest := self._oldest()) is not None:
            nbytes -= oldest.nbytes
            gone += self.remove(oldest)
        return gone

    def _oldest(self) -> Bucket | None:
        return next((bucket for bucket in self._all.values() if bucket is not self._filling), None)

    def shrink(self) -> list[Entry]:
        """Let buckets go until the rest has room; what went with them."""
        with self.lock:
            return self._retire(self.used_bytes - self.capacity_bytes)

    def remove(self, bucket: Bucket) -> list[Entry]:
        """Delete a bucket; who reads from it finishes. With the lock."""
        if bucket.gone:
            return []
        bucket.gone = True
        del self._all[bucket.place]
        if self._filling is bucket:
            self._filling = None
        self.used_bytes -= bucket.nbytes
        with suppress(FileNotFoundError):
            bucket.path.unlink()
        if not bucket.users and bucket.file is not None:
            bucket.file.close()
            bucket.file = None
        gone = list(bucket.records.values())
        bucket.records.clear()
        return gone

    def seal(self, bucket: Bucket) -> None:
        """Nothing more is put into it, and what it does not use is given back. With the lock."""
        if self._filling is bucket:
            self._filling = None
        if bucket.sealed or bucket.gone:
            return
        bucket.sealed = True
        with suppress(OSError):
            os.truncate(bucket.path, bucket.used)
            self.used_bytes -= bucket.nbytes - bucket.used
            bucket.nbytes = bucket.used
        if not bucket.users and not bucket.records:
            self.remove(bucket)

    @contextmanager
    def opened(self, bucket: Bucket) -> Iterator[OpenFile]:
        """Its file, which stays open as long as the context. Raises OSError, and when it has gone."""
        file = self.acquire(bucket)
        try:
            yield file
        finally:
            self.release(bucket)

    def acquire(self, bucket: Bucket) -> OpenFile:
        """As :meth:`opened`, up to :meth:`release`."""
        with self.lock:
            if bucket.gone and bucket.file is None:
                raise OSError(errno.ENOENT, "the bucket has gone")
            bucket.users += 1
        try:
            with bucket.opening:
                if bucket.file is None:
                    bucket.file = self._files.open(bucket.path)
                return bucket.file
        except BaseException:
            self.release(bucket)
            raise

    def release(self, bucket: Bucket) -> None:
        """Who acquired it is done."""
        with self.lock:
            bucket.users -= 1
            if bucket.users:
                return
            if bucket.file is not None and bucket.gone:
                bucket.file.close()
                bucket.file = None
            elif bucket.sealed and not bucket.records:
                self.remove(bucket)
            self._close_some()

    def _close_some(self) -> None:
        idle = [bucket for bucket in self._all.values() if bucket.file is not None and not bucket.users]
        for bucket in idle[: max(0, len(idle) - MAX_OPEN)]:
            assert bucket.file is not None
            bucket.file.close()
            bucket.file = None

    def close(self) -> None:
        """Close the files. With nothing under way."""
        with self.lock:
            if self._filling is not None:
                self.seal(self._filling)
            for bucket in self._all.values():
                if bucket.file is not None:
                    bucket.file.close()
                    bucket.file = None
