"""Values as memory of this process, without a copy where they lie on this host."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import LeaseExpired, StoreError, ValueInvalid
from mooncake_store.local_memory import Staged, StagingBuffers
from mooncake_store.mover import Mover
from mooncake_store.own_segment import Bytes
from mooncake_store.reader import Reading

__all__ = ["ValueBuffer", "open_buffers"]

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Array = npt.NDArray[np.uint8]
else:
    Array = np.ndarray


class _Lease:
    """The lease of one read, until the last of its buffers has been closed or dropped. Thread-safe."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._lock = threading.RLock()  # a buffer may be collected, and dropped, anywhere: in here, too
        self._open = 0

    def join(self) -> None:
        """One more buffer has it."""
        with self._lock:
            self._open += 1

    def holds(self) -> bool:
        """Whether it is known to have held until the last heartbeat; asks nobody."""
        return self._reading.holds()

    def leave(self, position: int) -> bool:
        """A buffer is closed; whether the lease has held until now, as the master says. Raises StoreError."""
        # While this one counts, and the lease is not ended by another. Its end alone does not tell of owners
        # that were lost and came back while another replica stayed: who reads through an access key need not
        # know, but what is mapped has no such key.
        held = self._reading.confirms()
        if not self._leaves_last():
            return held
        self._reading.end()
        return held and bool(self._reading.good[position])

    def drop(self) -> None:
        """A buffer is gone, and nobody asks. Never waits."""
        if self._leaves_last():
            self._reading.drop()

    def _leaves_last(self) -> bool:
        with self._lock:
            self._open -= 1
            return self._open == 0


class _Memory:
    """What every view of a buffer's bytes holds on to, whoever made it."""

    def __init__(self, array: Bytes, lease: _Lease | None, position: int) -> None:
        self._array = array  # keeps the memory
        self.shared = lease is not None
        self.lease = lease
        self.position = position
        self.open = True
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, True)}
        if lease is not None:
            lease.join()

    def take_lease(self) -> _Lease | None:
        self.open = False
        lease, self.lease = self.lease, None
        return lease

    def __del__(self) -> None:
        lease = self.take_lease()
        if lease is not None:
            lease.drop()


class ValueBuffer(Array):
    """A value, read-only: an array of its bytes with the buffer protocol (``memoryview(buffer)``).

    Where the value lies in memory of this host it is that memory, with no copy, and a lease keeps it as it
    is. The lease is renewed until ``close()``, or until the last view of the bytes is gone. Who uses the
    buffer as a context manager, or closes it, learns there whether what was seen was right all the time;
    views are not to be used after that. If the owner's process dies, its memory stays mapped here, and as it
    was; but when the master has given an owner up, and it may come back with the same memory, that is not
    told apart: the lease is over. A value that lies elsewhere is copied once, and the copy is right for ever.

    Attributes of arrays are those of numpy. A slice is no buffer to be closed, but keeps the lease.
    """

    _memory: _Memory | None

    @classmethod
    def _of(cls, array: Bytes, lease: _Lease | None, position: int) -> ValueBuffer:
        memory = _Memory(array, lease, position)
        buffer: ValueBuffer = np.asarray(memory).view(cls)
        buffer._memory = memory
        return buffer

    def __array_finalize__(self, parent: Any) -> None:
        """Not part of the interface: numpy calls it for every array made from this one."""
        self._memory = None

    @property
    def shared(self) -> bool:
        """Whether this is the store's memory itself, not a copy."""
        return self._whole().shared

    @property
    def valid(self) -> bool:
        """Whether the bytes are known to be the value's still: not closed, and the lease in force.

        Asks nobody: it tells what the last heartbeat said that the master answered, which is of some time ago
        (up to ``heartbeat_s``, or a quarter of the lease's time); ``close()`` asks. False also while that is
        unknown, and for all buffers of a batch when the owner of one of its values has been lost.
        """
        memory = self._whole()
        lease = memory.lease
        return memory.open and (not memory.shared or (lease is not None and lease.holds()))

    def close(self) -> None:
        """End the lease; of shared memory, the master is asked whether it has held until now. Raises
        LeaseExpired when that is not known: whatever was read is void then. Safe to call twice; the second
        time says nothing.
        """
        memory = self._whole()
        lease = memory.take_lease()
        if lease is not None and not lease.leave(memory.position):
            raise LeaseExpired(
                "the lease of a buffer ended while it was in use (the master or the owner of the "
                "memory was lost, or this process was stopped for too long): what was read from it is void; "
                "get it again"
            )

    def _whole(self) -> _Memory:
        if self._memory is None:
            raise ValueInvalid("this is made from a buffer of a value, and is none itself; use that one")
        return self._memory

    def __enter__(self) -> ValueBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StoreError as problem:
            if error is None:
                raise
            log.debug("a buffer was not right until its end, and neither was its user: %s", problem)


def open_buffers(reading: Reading, mover: Mover, staging: StagingBuffers) -> list[ValueBuffer | None]:
    """Take a lease on the values of a read, and make a buffer of each; None for what is not there."""
    reading.__enter__()
    lease = _Lease(reading)
    lease.join()  # until all are made
    buffers: list[ValueBuffer | None] = [None] * len(reading.found)
    try:
        copies: list[tuple[int, Bytes]] = []
        for position in np.flatnonzero(reading.found).tolist():
            array = _shared(reading, mover, position)
            if array is not None:
                buffers[position] = ValueBuffer._of(array, lease, position)
            else:
                copies.append((position, _copied(reading, staging, position)))
        right = reading.copied([position for position, _ in copies])
        if any(reading.expired[position] for position, _ in copies):
            raise LeaseExpired(
                "the lease of values ended while they were copied (the master was exchanged, or this process "
                "was stopped for too long): what was read is void; a retry is safe"
            )
        for (position, array), good in zip(copies, right, strict=True):
            buffers[position] = ValueBuffer._of(array, None, position) if good else None
    finally:
        lease.drop()
    return buffers


def _shared(reading: Reading, mover: Mover, position: int) -> Bytes | None:
    nbytes = int(reading.sizes[position])
    extent = reading.extent(position)
    if extent is None or extent[2] != nbytes:
        return None
    segment, offset, _ = extent
    mapped = mover.mapped(reading.epoch, segment, reading.descriptor(segment))
    return None if mapped is None else mapped[offset : offset + nbytes]


def _copied(reading: Reading, staging: StagingBuffers, position: int) -> Bytes:
    value: Bytes = np.empty(int(reading.sizes[position]), dtype=np.uint8)
    with Staged(value, staging, holds_data=False) as memory:
        reading.fetch_parts(memory, np.array([[position, 0, 0, value.nbytes]], dtype=np.uint64))
    return value
