"""Files by ``pread`` and ``pwrite`` in threads, past the page cache where the file system allows that."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np

from mooncake_store._errors import TierTimeout
from mooncake_store.tiers.codec import BLOCK_BYTES
from mooncake_store.tiers.contract import Bytes
from mooncake_store.tiers.files.access import Piece
from mooncake_store.tiers.workers import Workers, outcome

__all__ = ["ThreadFiles"]

CHUNK_BYTES = 1 << 20
KEPT_BYTES = 64 << 20

log = logging.getLogger(__name__)


class ThreadFiles:
    """See :class:`Files`. Reads go to memory of its own first: one that comes too late does no harm."""

    def __init__(self, workers: int = 16, *, direct: bool = True) -> None:
        self.name = "threads"
        self.direct = direct
        self.workers = Workers(workers, "mooncake-store-tier")
        self.buffers = _Buffers()

    def open(self, path: str | os.PathLike[str]) -> _File:
        """See :class:`Files`."""
        return _File(self, os.fspath(path))

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[Bytes]:
        """See :class:`Files`."""
        yield _pages(nbytes)

    def lend_memory(self, memory: Bytes) -> None:
        """Nothing to do: bytes go through memory of this object."""

    def go_through_the_cache(self, why: str) -> None:
        """Direct I/O does not work here; it is not tried again."""
        if self.direct:
            self.direct = False
            log.warning("direct I/O does not work, so the page cache is used from now on: %s", why)

    def close(self, timeout_s: float) -> None:
        """See :class:`Files`."""
        self.workers.close(timeout_s)
        self.buffers.clear()


class _File:
    """One file, open once through the page cache and once past it."""

    def __init__(self, files: ThreadFiles, path: str) -> None:
        self._files = files
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._direct_fd = -1
        if files.direct:
            try:
                self._direct_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                files.go_through_the_cache(f"cannot open {path} with O_DIRECT: {error.strerror}")

    def start(self, pieces: Sequence[Piece], *, write: bool) -> _Running:
        """See :class:`OpenFile`."""
        parts = [
            Piece(piece.offset + at, piece.memory[at : at + CHUNK_BYTES])
            for piece in pieces
            for at in range(0, piece.memory.nbytes, CHUNK_BYTES)
        ]
        submit, act = self._files.workers.submit, self._write if write else self._read
        return _Running(
            self._files.buffers, [(part, submit(partial(act, part))) for part in parts], write=write
        )

    def sync(self) -> None:
        """See :class:`OpenFile`."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """See :class:`OpenFile`."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def _read(self, part: Piece) -> Bytes | None:
        buffer = self._files.buffers.take()
        memory = buffer[: part.memory.nbytes]
        done = 0
        while done < memory.nbytes:
            got = self._once(part.offset + done, memory[done:], write=False)
            if not got:
                raise OSError(
                    f"the file ends at {part.offset + done}, {memory.nbytes - done} bytes too early"
                )
            done += got
        return buffer

    def _write(self, part: Piece) -> Bytes | None:
        memory, buffer = part.memory, None
        if self._files.direct and memory.ctypes.data % BLOCK_BYTES:
            buffer = self._files.buffers.take()
            memory = buffer[: part.memory.nbytes]
            memory[:] = part.memory
        done = 0
        while done < memory.nbytes:
            done += self._once(part.offset + done, memory[done:], write=True)
        return buffer

    def _once(self, offset: int, memory: Bytes, *, write: bool) -> int:
        act = os.pwritev if write else os.preadv
        aligned = not (offset | memory.nbytes | memory.ctypes.data) % BLOCK_BYTES
        if self._files.direct and self._direct_fd >= 0 and aligned:
            try:
                return act(self._direct_fd, [memory.data], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some file systems open so, and refuse later
                    raise
                self._files.go_through_the_cache(f"O_DIRECT: {error.strerror}")
        return act(self._fd, [memory.data], offset)


class _Running:
    def __init__(
        self, buffers: _Buffers, parts: Sequence[tuple[Piece, Future[Bytes | None]]], *, write: bool
    ) -> None:
        self._buffers = buffers
        self._parts = parts
        self._write = write

    def wait(self, deadline_s: float) -> None:
        """See :class:`Running`."""
        failure: Exception | None = None
        for part, future in self._parts:
            found = outcome(future, deadline_s)
            if isinstance(found, Exception):
                # What hangs keeps its memory; all others are waited for, so that it can be used again.
                failure = failure if isinstance(failure, TierTimeout) else found
                continue
            if found is None:
                continue
            if not self._write:
                part.memory[:] = found[: part.memory.nbytes]
            self._buffers.give_back(found)
        self._parts = []
        if failure is not None:
            raise failure


class _Buffers:
    """Memory for one operation each, aligned. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Bytes] = []

    def take(self) -> Bytes:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _pages(CHUNK_BYTES)

    def give_back(self, buffer: Bytes) -> None:
        with self._lock:
            if len(self._idle) < KEPT_BYTES // CHUNK_BYTES:
                self._idle.append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


def _pages(nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, max(nbytes, BLOCK_BYTES)), dtype=np.uint8)[:nbytes]
