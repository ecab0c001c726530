"""Files by the nvmeof driver: io_uring, direct I/O, straight between the medium and registered memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_store._errors import TierTimeout
from mooncake_store.tiers.codec import BLOCK_BYTES
from mooncake_store.tiers.contract import Bytes
from mooncake_store.tiers.files.access import Piece
from mooncake_transfer import Region, RemoteRegion, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import MemoryUnavailable, TransferError, TransferTimeout
from mooncake_transfer.memory import FileSource

__all__ = ["DRIVER", "DriverFiles"]

DRIVER = "nvmeof"
SCRATCH_BYTES = 8 << 20
KEPT_SCRATCHES = 8
CLOSE_TIMEOUT_S = 5.0


class DriverFiles:
    """See :class:`Files`. Has an engine of its own, so that the files have nothing to do with peers."""

    def __init__(self, **options: str | int | float | bool) -> None:
        """``options`` of the driver. Raises TransferError when it does not work here."""
        config = TransferConfig(drivers=(DRIVER,), driver_options={DRIVER: options})
        self.engine = TransferEngine(config)
        self.name = f"the {DRIVER} driver"
        self._lock = threading.Lock()
        self._lent: list[_Memory] = []
        self._idle: list[_Memory] = []

    def open(self, path: str | os.PathLike[str]) -> _File:
        """See :class:`Files`."""
        try:
            return _File(self, path)
        except TransferError as error:
            raise OSError(f"cannot open {os.fspath(path)}: {error}") from error

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[Bytes]:
        """See :class:`Files`."""
        memory = self.take(nbytes)
        try:
            yield memory.array[:nbytes]
        finally:
            self.give_back(memory)

    def lend_memory(self, memory: Bytes) -> None:
        """See :class:`Tier`."""
        lent = _Memory(self.engine.register(memory, name="tier-lent"), memory)
        with self._lock:
            self._lent.append(lent)

    def take(self, nbytes: int) -> _Memory:
        """Registered memory for a while. Raises MemoryError."""
        if nbytes <= SCRATCH_BYTES:
            with self._lock:
                if self._idle:
                    memory = self._idle.pop()
                    self._lent.append(memory)
                    return memory
        try:
            region = self.engine.allocate(max(nbytes, SCRATCH_BYTES), name="tier-scratch")
        except MemoryUnavailable as error:
            raise MemoryError(
                f"no {nbytes} bytes of memory for reading and writing a tier: {error}"
            ) from error
        memory = _Memory(region, np.frombuffer(region.view(), dtype=np.uint8))
        with self._lock:
            self._lent.append(memory)
        return memory

    def give_back(self, memory: _Memory) -> None:
        """It is not used any more."""
        with self._lock:
            self._lent.remove(memory)
            keep = memory.region.nbytes == SCRATCH_BYTES and len(self._idle) < KEPT_SCRATCHES
            if keep:
                self._idle.append(memory)
        if not keep:
            memory.region.close()

    def abandon(self, memory: _Memory) -> None:
        """It may be used for ever: it stays until the engine is closed."""
        with self._lock:
            self._lent.remove(memory)

    def find(self, array: Bytes) -> tuple[_Memory, int] | None:
        """The registered memory in which the array lies, and where in it."""
        first = array.ctypes.data
        with self._lock:
            for memory in self._lent:
                offset = first - memory.region.address
                if offset >= 0 and offset + array.nbytes <= memory.region.nbytes:
                    return memory, offset
        return None

    def close(self, timeout_s: float) -> None:
        """See :class:`Files`."""
        self.engine.close()


@dataclass(eq=False, slots=True)
class _Memory:
    region: Region
    array: Bytes


class _File:
    def __init__(self, files: DriverFiles, path: str | os.PathLike[str]) -> None:
        self._files = files
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._region = files.engine.register(FileSource(self._fd), name=Path(path).name)
            self._place = files.engine.import_region(self._region.descriptor())
        except BaseException:
            os.close(self._fd)
            raise

    def start(self, pieces: Sequence[Piece], *, write: bool) -> _Running:
        """See :class:`OpenFile`."""
        return _Running(self._files, self._place, pieces, write=write)

    def sync(self) -> None:
        """See :class:`OpenFile`."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """See :class:`OpenFile`."""
        with suppress(TransferError):  # busy: the engine closes it at its own end
            self._region.close(CLOSE_TIMEOUT_S)
        os.close(self._fd)


class _Running:
    """One transfer for each registered memory, and one through a scratch for all that is none."""

    def __init__(
        self, files: DriverFiles, place: RemoteRegion, pieces: Sequence[Piece], *, write: bool
    ) -> None:
        self._files = files
        self._write = write
        self._scratch: _Memory | None = None
        self._copies: list[tuple[Bytes, Bytes]] = []
        self._transfers: list[Transfer] = []
        blocks: dict[_Memory, list[tuple[int, int, int]]] = {}
        strange: list[Piece] = []
        for piece in pieces:
            if not piece.memory.nbytes:
                continue
            found = files.find(piece.memory)
            if found is None or found[1] % BLOCK_BYTES:
                strange.append(piece)
            else:
                blocks.setdefault(found[0], []).append((found[1], piece.offset, piece.memory.nbytes))
        if strange:
            scratch, rows = self._stage(strange)
            blocks.setdefault(scratch, []).extend(rows)
        act = files.engine.write if write else files.engine.read
        try:
            for memory, block_rows in blocks.items():
                rows_array = np.array(block_rows, dtype=np.uint64)
                self._transfers.append(act(memory.region, place, rows_array))
        except TransferError as error:
            self._end()
            raise OSError(str(error)) from error

    def _stage(self, pieces: list[Piece]) -> tuple[_Memory, list[tuple[int, int, int]]]:
        starts, at = [], 0
        for piece in pieces:
            starts.append(at)
            at += -(-piece.memory.nbytes // BLOCK_BYTES) * BLOCK_BYTES
        scratch = self._scratch = self._files.take(at)
        rows = []
        for piece, start in zip(pieces, starts, strict=True):
            staged = scratch.array[start : start + piece.memory.nbytes]
            rows.append((start, piece.offset, piece.memory.nbytes))
            if self._write:
                staged[:] = piece.memory
            else:
                self._copies.append((piece.memory, staged))
        return scratch, rows

    def wait(self, deadline_s: float) -> None:
        """See :class:`Running`."""
        failure: TransferError | None = None
        for transfer in self._transfers:
            try:
                transfer.wait(max(0.0, deadline_s - time.monotonic()))
            except TransferError as error:
                failure = error
        if failure is None:
            for memory, staged in self._copies:
                memory[:] = staged
        if isinstance(failure, TransferTimeout) and self._scratch is not None:
            self._files.abandon(self._scratch)  # what the kernel has begun may still come
            self._scratch = None
        self._end()
        if isinstance(failure, TransferTimeout):
            raise TierTimeout(str(failure)) from failure
        if failure is not None:
            raise OSError(str(failure)) from failure

    def _end(self) -> None:
        self._transfers, self._copies = [], []
        if self._scratch is not None:
            self._files.give_back(self._scratch)
            self._scratch = None
