"""The memory this client lends to the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import StoreClosed
from mooncake_transfer import Region, TransferEngine

__all__ = ["Bytes", "OwnSegment"]

Bytes = npt.NDArray[np.uint8]
NOWHERE = (0, 0)


class OwnSegment:
    """A region of the engine, replaced by a fresh one each time the client joins a master anew.

    A fresh region has a fresh access key: after the exchange nobody who knew the old one can write to
    memory that the master hands out again. Thread-safe.
    """

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        """Allocate the memory. Raises MemoryUnavailable of the transfer engine."""
        self._engine = engine
        self._nbytes = nbytes
        self._changed = threading.Condition()
        self._users = 0
        self._place = NOWHERE
        self._closed = False
        self._region: Region | None = self._allocate()
        self._old: Region | None = None

    @property
    def region(self) -> Region | None:
        """The region lent now; None for the short time of an exchange."""
        return self._region

    def renew(self, timeout_s: float) -> None:
        """Exchange the region. Raises RegionBusy or MemoryUnavailable: then call again later."""
        with self._changed:
            self._place = NOWHERE
            if self._region is not None:
                self._old, self._region = self._region, None
            # Copies of this process know no access key, so they are waited for.
            if not self._changed.wait_for(lambda: self._users == 0, timeout_s):
                raise TimeoutError(f"copies to or from the segment did not end within {timeout_s:g} s")
        if self._old is not None:
            self._old.close(timeout_s)
            self._old = None
        region = self._allocate()
        with self._changed:
            if not self._closed:
                self._region = region
                return
        region.close()
        raise StoreClosed("the store was closed while its segment was being exchanged")

    def mounted(self, epoch: int, segment: int) -> None:
        """The master of ``epoch`` knows the region as ``segment``."""
        with self._changed:
            self._place = (epoch, segment)

    def holds(self, epoch: int, segment: int) -> bool:
        """Whether this is what the master of ``epoch`` calls ``segment``."""
        return bool(segment) and self._place == (epoch, segment)

    @contextmanager
    def bytes_of(self, epoch: int, segment: int) -> Iterator[Bytes | None]:
        """The segment's bytes, which stay as long as the context; None when ``segment`` is another one.

        No call to the master may be made inside.
        """
        with self._changed:
            region = self._region if self.holds(epoch, segment) else None
            self._users += region is not None
        try:
            yield None if region is None else np.frombuffer(region.view(), dtype=np.uint8)
        finally:
            if region is not None:
                with self._changed:
                    self._users -= 1
                    self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Give the memory back. Raises RegionBusy when peers still use it after ``timeout_s``."""
        with self._changed:
            self._closed = True
            self._place = NOWHERE
            regions = [region for region in (self._region, self._old) if region is not None]
            self._region = self._old = None
            self._changed.wait_for(lambda: self._users == 0, timeout_s)
        for region in regions:
            region.close(timeout_s)

    def _allocate(self) -> Region:
        # Backed now: a machine without the memory is refused here, not killed at some later put.
        return self._engine.allocate(self._nbytes, name="store-segment", prefault=True)
