"""The memory this client lends to the store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import StoreClosed
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import DriverUnavailable

__all__ = ["Bytes", "OwnSegment"]

Bytes = npt.NDArray[np.uint8]
NOWHERE = (0, 0)


class OwnSegment:
    """A region of the engine, with a fresh access key each time the client joins a master anew.

    Nobody who knew the old one can write any more to memory that the master hands out again. Thread-safe.
    """

    def __init__(
        self,
        engine: TransferEngine,
        nbytes: int,
        numa_node: int | None = None,
        driver: str | None = None,
    ) -> None:
        """Allocate the memory. Raises MemoryUnavailable of the transfer engine."""
        self._engine = engine
        self._nbytes = nbytes
        self._numa_node = numa_node
        self._driver = driver
        self._changed = threading.Condition()
        self._users = 0
        self._place = NOWHERE
        self._closed = False
        self._region: Region | None = self._allocate()
        self._id = _new_id()
        self._old: Region | None = None
        self._granted = b""

    def descriptor(self) -> bytes:
        """What others need to reach the memory; valid until the next :meth:`rekey` or :meth:`renew`."""
        region = self._region
        if region is None:
            raise StoreClosed("the store was closed while its segment was being exchanged")
        if not self._granted:
            try:
                self._granted = region.grant("rw")
            except DriverUnavailable:
                return region.descriptor()  # of a driver that cannot take it back: the memory is exchanged
        return self._granted

    def rekey(self, timeout_s: float) -> bool:
        """Take the access key back, and wait for writes that are under way; what lies there stays.

        False when the driver cannot do that. Raises RegionBusy or TimeoutError: then call again later.
        """
        with self._changed:
            self._place = NOWHERE
            region = self._region
            if region is None or not self._granted:
                return False
            # Copies of this process know no access key, so they are waited for.
            if not self._changed.wait_for(lambda: self._users == 0, timeout_s):
                raise TimeoutError(f"copies to or from the segment did not end within {timeout_s:g} s")
        region.revoke(self._granted, timeout_s)
        self._granted = b""
        return True

    @property
    def region(self) -> Region | None:
        """The region lent now; None for the short time of an exchange."""
        return self._region

    @property
    def id(self) -> int:
        """What masters call it: random, and another one after each exchange of the memory."""
        return self._id

    def renew(self, timeout_s: float) -> None:
        """Exchange the region. Raises RegionBusy or MemoryUnavailable: then call again later."""
        with self._changed:
            self._place = NOWHERE
            self._granted = b""
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
                self._id = _new_id()
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
    def bytes_of(self, epoch: int, segment: int, descriptor: bytes | None = None) -> Iterator[Bytes | None]:
        """The segment's bytes, which stay as long as the context; None when ``segment`` is another one.

        Also when the master gave its ``descriptor`` before the client joined it anew, which took others'
        access keys back: room given out before may be another value's. No call to the master may be made
        inside.
        """
        with self._changed:
            current = descriptor is None or not self._granted or descriptor == self._granted
            region = self._region if current and self.holds(epoch, segment) else None
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
        driver = self._engine.config.allocate_from if self._driver is None else self._driver
        if driver:  # whose memory is as it is
            return self._engine.allocate(self._nbytes, name="store-segment", driver=driver)
        # Backed now: a machine without the memory is refused here, not killed at some later put.
        return self._engine.allocate(
            self._nbytes, name="store-segment", prefault=True, numa_node=self._numa_node, driver=driver
        )


def _new_id() -> int:
    return secrets.randbits(63) | 1
