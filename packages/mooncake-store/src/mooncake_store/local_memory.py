"""The two kinds of memory a user reads into or writes from: registered with the engine, or not."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import TypeVar

import numpy as np

from mooncake_store.own_segment import Bytes
from mooncake_store.parts import Uints
from mooncake_transfer import MemoryKind, Region, TransferEngine

__all__ = ["Buffer", "Received", "Registered", "Staged", "StagingBuffers"]

KEPT_BUFFERS = 4
Buffer = tuple[Region, Bytes]
S = TypeVar("S", bound="Staged")

log = logging.getLogger(__name__)


class Registered:
    """A region of the user: bytes move straight between it and the segments.

    Attributes:
        in_use: a driver has not let go of it. Who lent it for one call must not use it for another.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self.in_use = False

    @property
    def array(self) -> Bytes:
        """All of it, flat."""
        return np.frombuffer(self._region.view(), dtype=np.uint8)

    @property
    def readable(self) -> bool:
        """Whether this process can look into it."""
        return self._region.kind is MemoryKind.DRAM

    @property
    def content(self) -> Bytes:
        """What has arrived, or is to be written."""
        return self.array

    def region(self) -> Region:
        """The region itself."""
        return self._region

    def arrived(self, blocks: Uints) -> None:
        """Nothing to do: they arrived where they belong."""

    def keep(self) -> None:
        """See ``in_use``; a user learns it from the log, and from the region's own ``close()``."""
        self.in_use = True


class StagingBuffers:
    """Regions through which unregistered memory reaches other processes. Thread-safe."""

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        self._engine = engine
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        self._lost: list[Buffer] = []
        self._closed = False

    def take(self, nbytes: int) -> Buffer:
        """A region of at least ``nbytes``, and its bytes. Raises MemoryUnavailable of the engine."""
        if nbytes <= self._nbytes:
            with self._lock:
                if self._idle:
                    return self._idle.pop()
        region = self._engine.allocate(max(nbytes, self._nbytes), name="store-staging")
        return region, np.frombuffer(region.view(), dtype=np.uint8)

    def give_back(self, buffer: Buffer) -> None:
        """The region is not used any more, by nobody."""
        region, _ = buffer
        with self._lock:
            keep = region.nbytes == self._nbytes and len(self._idle) < KEPT_BUFFERS and not self._closed
            if keep:
                self._idle.append(buffer)
        if not keep:
            region.close()

    def lose(self, buffer: Buffer) -> None:
        """A driver may still read or write the region: nobody gets it any more, and it is freed with the
        engine.
        """
        log.warning("%d bytes of staging are given up: a driver does not let go of them", buffer[0].nbytes)
        with self._lock:
            self._lost.append(buffer)

    def close(self) -> None:
        """Free the buffers."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for region, _ in idle:
            region.close()


class Staged:
    """Any memory of this process. Takes a staging buffer only when bytes go to or come from another process.

    A context manager: the buffer is given back at its end.
    """

    def __init__(self, array: Bytes, buffers: StagingBuffers, *, holds_data: bool) -> None:
        """``holds_data``: the memory is going to be written from; otherwise it is read into."""
        self.array = array
        self._buffers = buffers
        self._holds_data = holds_data
        self._buffer: Buffer | None = None
        self._staging: Bytes = array
        self._in_use = False

    readable = True

    @property
    def content(self) -> Bytes:
        """What has arrived, or is to be written."""
        return self.array

    def region(self) -> Region:
        """A staging buffer; with a copy of the memory when that is to be written from."""
        if self._buffer is None:
            self._buffer = self._buffers.take(self.array.nbytes)
            self._staging = self._buffer[1]
            if self._holds_data:
                self._staging[: self.array.nbytes] = self.array
        return self._buffer[0]

    def arrived(self, blocks: Uints) -> None:
        """Bring the blocks to where they belong."""
        for start, _, nbytes in blocks.tolist():
            self.array[start : start + nbytes] = self._staging[start : start + nbytes]

    def keep(self) -> None:
        """A driver has not let go of the buffer."""
        self._in_use = True

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._buffer is not None:
            (self._buffers.lose if self._in_use else self._buffers.give_back)(self._buffer)
            self._buffer = None


class Received(Staged):
    """Memory that one value, or a part of one, is read into, to become bytes."""

    def __init__(self, nbytes: int, buffers: StagingBuffers) -> None:
        super().__init__(np.empty(nbytes, dtype=np.uint8), buffers, holds_data=False)
        self._whole: bytes | None = None

    def arrived(self, blocks: Uints) -> None:
        """What arrives in one piece, as it mostly does, is copied once only."""
        if blocks.item(0) == 0 and blocks.item(2) == self.array.nbytes:
            self._whole = self._staging[: self.array.nbytes].tobytes()
        else:
            super().arrived(blocks)

    @property
    def content(self) -> Bytes:
        """What has arrived."""
        return self.array if self._whole is None else np.frombuffer(self._whole, dtype=np.uint8)

    def value(self) -> bytes:
        """The bytes, when all have arrived; inside the context."""
        whole = self._whole
        return self.array.tobytes() if whole is None else whole
