"""The memory this client lends to the store."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import StoreClosed
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import DriverUnavailable, TransferError

__all__ = ["Bytes", "OwnSegment"]

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
NOWHERE = (0, 0)
UNUSED_TIMEOUT_S = 1.0  # for a key that nobody has got


class OwnSegment:
    """A region of the engine, with an access key that is exchanged for another one.

    When the client joins a master anew, and when the master wants late writers shut out: nobody who knew the
    old key can then write any more to memory that the master hands out again. Thread-safe.
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
        self._users: Counter[bytes] = Counter()  # by the descriptor that they came with
        self._place = NOWHERE
        self._closed = False
        self._region: Region | None = self._allocate()
        self._id = _new_id()
        self._old: Region | None = None
        self._granted = b""
        self._older: list[bytes] = []  # granted before, and not taken back yet
        self._closing: list[bytes] = []  # those that nobody of this process may begin with any more
        self._revoking = threading.Lock()

    def descriptor(self) -> bytes:
        """What others need to reach the memory; valid until the next :meth:`rekey` or :meth:`renew`, or
        until :meth:`retire` after a :meth:`regrant`.
        """
        region = self._region
        if region is None:
            raise StoreClosed("the store was closed while its segment was being exchanged")
        if not self._granted:
            try:
                self._granted = region.grant("rw")
            except DriverUnavailable as error:  # of drivers that cannot take keys back
                log.warning(
                    "room of writers that are late stays out of use until this store joins anew, with other "
                    "memory: %s",
                    error,
                )
                return region.descriptor()
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
            self._wait_for_copies(timeout_s)
        with self._revoking:
            for descriptor in [*self._older, self._granted]:
                region.revoke(descriptor, timeout_s)
                self._forget(descriptor)
        return True

    def regrant(self) -> tuple[bytes, bytes]:
        """Make a new access key, beside the one in force: the descriptors with that one, and with the new.

        Until :meth:`retire` has been done, the same two. Empty when nothing is granted: the driver cannot
        take keys back, or the memory is just being taken from everybody. Raises DriverUnavailable when a
        driver that takes the old key would not take the new one.
        """
        with self._revoking:
            region, granted = self._region, self._granted
            if region is None or not granted:
                return b"", b""
            if self._older:
                return self._older[-1], granted
            new = region.grant("rw")
            missing = region.ways(granted) - region.ways(new)
            with self._changed:
                # An exchange of the memory waits for nobody here.
                current = self._region is region and self._granted == granted
                if current and not missing:
                    self._older, self._granted = [granted], new
                    return granted, new
            with suppress(TransferError, TimeoutError):
                region.revoke(new, UNUSED_TIMEOUT_S)
        if not current:
            return b"", b""
        names = ", ".join(f"{driver} {device}".rstrip() for driver, device in sorted(missing))
        raise DriverUnavailable(f"no new access key for the segment now from: {names}")

    def retire(self, descriptor: bytes, timeout_s: float) -> bool:
        """Take back all keys but the one of ``descriptor``, which :meth:`regrant` has made, and wait for who
        works under them.

        False when the memory was taken from everybody meanwhile. Raises RegionBusy or TimeoutError: then call
        again later.
        """
        with self._revoking:
            region = self._region
            with self._changed:
                if region is None or descriptor != self._granted:
                    return False
                older = self._closing = list(self._older)
                # Copies of this process know no access key.
                if not self._changed.wait_for(
                    lambda: not any(self._users[one] for one in self._older), timeout_s
                ):
                    raise TimeoutError(f"copies of this process did not end within {timeout_s:g} s")
            for one in older:
                region.revoke(one, timeout_s)
                self._forget(one)
            return True

    def _forget(self, descriptor: bytes) -> None:
        with self._changed:
            self._older = [one for one in self._older if one != descriptor]
            self._granted = b"" if self._granted == descriptor else self._granted

    def _wait_for_copies(self, timeout_s: float) -> None:
        # Copies of this process know no access key, so they are waited for.
        if not self._changed.wait_for(lambda: not self._users.total(), timeout_s):
            raise TimeoutError(f"copies to or from the segment did not end within {timeout_s:g} s")

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
            self._granted, self._older = b"", []
            if self._region is not None:
                self._old, self._region = self._region, None
            self._wait_for_copies(timeout_s)
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
            named = self._granted if descriptor is None else descriptor
            older = named in self._older and named not in self._closing
            current = not self._granted or named == self._granted or older
            region = self._region if current and self.holds(epoch, segment) else None
            if region is not None:
                self._users[named] += 1
        try:
            yield None if region is None else np.frombuffer(region.view(), dtype=np.uint8)
        finally:
            if region is not None:
                with self._changed:
                    self._users[named] -= 1
                    if not self._users[named]:
                        del self._users[named]
                    self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Give the memory back. Raises RegionBusy when peers still use it after ``timeout_s``."""
        with self._changed:
            self._closed = True
            self._place = NOWHERE
            regions = [region for region in (self._region, self._old) if region is not None]
            self._region = self._old = None
            self._changed.wait_for(lambda: not self._users.total(), timeout_s)
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
