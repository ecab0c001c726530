"""Records as files of a shared, mounted file system."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mooncake_store._errors import ConfigError, TierFull
from mooncake_store.tiers.cipher import Secret
from mooncake_store.tiers.codec import Header
from mooncake_store.tiers.contract import Bytes, Gone, TierRoom
from mooncake_store.tiers.folder import prepare_folder
from mooncake_store.tiers.objects.tier import ObjectTier

__all__ = ["DirectoryTier"]

SUFFIX, PART_SUFFIX, QUARANTINE = ".record", ".part", "quarantine"
# Files of writers that ended in the middle; no write takes that long.
ABANDONED_AFTER_S = 3600.0
# Reads of a file refresh its time of last use no more often than this: that is a write, too.
TOUCH_EVERY_S = 60.0
QUARANTINED_AT_MOST = 64
# Room is looked after when so much of the capacity has been written by this process.
SWEEP_EVERY = 0.02
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class DirectoryTier(ObjectTier):
    """A folder that several processes and machines see: NFS, 3FS, Lustre, CephFS, or of this machine.

    The file system has to rename within a folder atomically, and show a file that was closed and then renamed
    with all its content to whoever opens it afterwards (close-to-open, as NFS has it). No locks are used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int = 0,
        *,
        secret: Secret | None = None,
        workers: int = 16,
        durable: bool = False,
        on_gone: Gone | None = None,
    ) -> None:
        """Open it.

        Args:
            folder: made when it is not there.
            capacity_bytes: once more than that is in it, the records go that were not read for longest; all
                processes that share it should say the same. 0: no limit but the file system's.
            secret: encrypts what is written; the same for all that share it.
            workers: files under way at a time.
            durable: a write is done once it is on the medium.

        Raises ConfigError, TierUnavailable, TierKeyWrong.
        """
        if capacity_bytes < 0 or workers < 1:
            raise ConfigError(
                f"capacity_bytes is {capacity_bytes} and workers {workers}; they must be at least 0 and 1"
            )
        root = Path(folder)
        identity = prepare_folder(root, "directory", secret)
        place = _Folder(root, capacity_bytes, durable=durable)
        super().__init__(identity.id, f"directory tier {root}", place, secret, workers, on_gone)
        place.looked_at, place.swept = self._header, self._swept

    def _swept(self, headers: list[Header | None]) -> None:
        """These had to make room."""
        self.counters.add(retired=len(headers))
        gone = [(one.digest, (one.epoch, one.version)) for one in headers if one is not None]
        if gone and self.on_gone is not None:
            self.on_gone(gone)


class _Folder:
    """See :class:`ObjectPlace`. Files lie in 256 folders, by the first byte of their names."""

    def __init__(self, root: Path, capacity_bytes: int, *, durable: bool) -> None:
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._durable = durable
        self._lock = threading.Lock()
        self._unswept_bytes = capacity_bytes  # looked after at the first write
        self._used = (0, 0)
        # How a file that is about to go begins, and what is told of those that went.
        self.looked_at: Callable[[str], Header | None] = lambda name: None
        self.swept: Callable[[list[Header | None]], None] = lambda headers: None

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """See :class:`ObjectPlace`."""
        self._make_room(sum(part.nbytes for part in parts))
        path = self._path(name)
        part = path.with_name(f"{name}.{secrets.token_hex(6)}{PART_SUFFIX}")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(part, "xb", buffering=0) as file:
                for memory in parts:
                    _write_all(file.fileno(), memory)
                if self._durable:
                    os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if error.errno in NO_ROOM:
                raise TierFull(f"{self._root} has no room for {name}: {error.strerror}") from error
            raise

    def get(self, name: str, most_bytes: int) -> Bytes | None:
        """See :class:`ObjectPlace`."""
        return self._read(name, most_bytes, whole=True)

    def head(self, name: str, nbytes: int) -> Bytes | None:
        """See :class:`ObjectPlace`."""
        return self._read(name, nbytes, whole=False)

    def _read(self, name: str, most_bytes: int, *, whole: bool) -> Bytes | None:
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            if whole and status.st_size > most_bytes:
                return None
            memory = np.empty(min(status.st_size, most_bytes), dtype=np.uint8)
            done = 0
            while done < memory.nbytes:
                got = os.preadv(fd, [memory[done:].data], done)
                if not got:
                    break
                done += got
            if whole and time.time() - status.st_mtime > TOUCH_EVERY_S:
                with suppress(OSError):
                    os.utime(fd)
            return memory[:done]
        finally:
            os.close(fd)

    def delete(self, name: str) -> bool:
        """See :class:`ObjectPlace`."""
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def quarantine(self, name: str) -> None:
        """See :class:`ObjectPlace`."""
        folder = self._root / QUARANTINE
        with suppress(FileNotFoundError):
            folder.mkdir(exist_ok=True)
            if sum(1 for _ in folder.iterdir()) < QUARANTINED_AT_MOST:
                self._path(name).rename(folder / f"{name}.{secrets.token_hex(4)}")
            else:
                self._path(name).unlink()

    def names(self) -> Iterator[str]:
        """See :class:`ObjectPlace`."""
        for entry, _ in self._files():
            yield entry.name.removesuffix(SUFFIX)

    def room(self) -> TierRoom:
        """See :class:`ObjectPlace`. As it was when room was last looked after."""
        with self._lock:
            return TierRoom(self._capacity_bytes, *self._used)

    def close(self) -> None:
        """See :class:`ObjectPlace`."""

    def _path(self, name: str) -> Path:
        return self._root / name[:2] / f"{name}{SUFFIX}"

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for folder in sorted(self._root.iterdir()):
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if entry.name.endswith(SUFFIX):
                            yield entry, entry.stat()
                        elif entry.name.endswith(PART_SUFFIX):
                            self._remove_abandoned(entry)

    @staticmethod
    def _remove_abandoned(entry: os.DirEntry[str]) -> None:
        if time.time() - entry.stat().st_mtime > ABANDONED_AFTER_S:
            Path(entry.path).unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> None:
        if not self._capacity_bytes:
            return
        with self._lock:
            self._unswept_bytes += nbytes
            due = self._unswept_bytes > SWEEP_EVERY * self._capacity_bytes
            if due:
                self._unswept_bytes = 0
        if due:
            self._sweep(nbytes)

    def _sweep(self, wanted_bytes: int) -> None:
        found = sorted((status.st_mtime, status.st_size, entry.path) for entry, status in self._files())
        used, left = sum(size for _, size, _ in found), len(found)
        removed: list[Header | None] = []
        # What may be written until the next look is kept free.
        target = self._capacity_bytes * (1 - SWEEP_EVERY) - wanted_bytes
        for _, size, path in found:
            if used <= target:
                break
            header = self.looked_at(Path(path).name.removesuffix(SUFFIX))
            with suppress(FileNotFoundError):  # another process removed it
                Path(path).unlink()
                removed.append(header)
            used -= size
            left -= 1
        with self._lock:
            self._used = (used, left)
        self.swept(removed)


def _write_all(fd: int, memory: Bytes) -> None:
    done = 0
    while done < memory.nbytes:
        done += os.write(fd, memory[done:].data)
