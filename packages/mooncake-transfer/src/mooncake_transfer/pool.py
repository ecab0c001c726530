"""Buffers cut from regions that are registered once: no registration, no page fault for each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

from mooncake_transfer._arguments import callback, number, seconds, text, wrong
from mooncake_transfer._errors import ConfigError, PoolExhausted, RegionBusy, RegionClosed
from mooncake_transfer.region import Region

__all__ = ["Allocator", "BufferPool", "PoolUsage", "PooledBuffer"]

SMALLEST_BYTES = 4096


class Allocator(Protocol):
    """What a pool needs of an engine."""

    def allocate(self, nbytes: int, *, name: str = "", prefault: bool = False) -> Region:
        """Allocate and register memory."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What a pool holds.

    Attributes:
        buffers: buffers in use.
        held_bytes: their sizes, rounded up to the powers of two they occupy.
        reserved_bytes: memory of all slabs.
        max_bytes: what that may grow to.
        slabs: regions behind the pool.
        waiting: callers that wait for a buffer.
        peak_bytes: the most that ``held_bytes`` has been.
    """

    buffers: int
    held_bytes: int
    reserved_bytes: int
    max_bytes: int
    slabs: int
    waiting: int
    peak_bytes: int


class PooledBuffer:
    """A part of a region, yours until ``release()`` or the end of the ``with`` block.

    Attributes:
        region: the region it is part of; pass it to ``read`` and ``write``.
        offset: where it begins in the region, in bytes; a multiple of its size rounded up to a power of two.
        nbytes: its size as asked for.
    """

    def __init__(self, pool: BufferPool, block: _Block, nbytes: int):
        self._pool = pool
        self._block: _Block | None = block
        self.region = block.slab.region
        self.offset = block.offset
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """The bytes, writable, without a copy; whatever the last user left in them. Raises RegionClosed."""
        if self._block is None:
            raise RegionClosed(f"this buffer of pool {self._pool.name!r} was released; acquire another one")
        return self.region.view()[self.offset : self.offset + self.nbytes]

    def release(self) -> None:
        """Give it back. No transfer may use it any more. Raises RegionClosed when it was released before."""
        self._pool._release(self)

    def __enter__(self) -> PooledBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block is not None:
            self.release()


@dataclass(slots=True, eq=False)
class _Slab:
    region: Region
    held: int = 0


class _Block(NamedTuple):
    slab: _Slab
    offset: int
    size: int


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    block: _Block | None = None


class BufferPool:
    """Buffers of any size up to a slab, from memory that is registered once. Thread-safe.

    Sizes are rounded up to powers of two from 4 KiB on; free neighbours join again, so that any pattern of
    use leaves the pool as it was. Callers are served in the order they came. Memory grows slab by slab up to
    ``max_bytes`` and stays registered until ``trim()`` or ``close()``.
    """

    def __init__(
        self,
        engine: Allocator,
        *,
        slab_bytes: int = 64 << 20,
        max_bytes: int = 1 << 30,
        name: str = "pool",
        allocate: Callable[[int, str], Region] | None = None,
    ) -> None:
        """``slab_bytes``: a power of two, 4 KiB or more; ``max_bytes``: at least that.

        ``allocate(nbytes, name)`` makes a slab's region where prefaulted ordinary pages are not what you
        want, such as huge pages or a NUMA node. Nothing is allocated yet. Raises ConfigError.
        """
        if not callable(getattr(engine, "allocate", None)):
            raise wrong("engine", engine, "a TransferEngine, or what has its allocate()")
        number(slab_bytes, "slab_bytes")
        number(max_bytes, "max_bytes")
        if allocate is not None:
            callback(allocate, "allocate", "nbytes, name")
        if slab_bytes < SMALLEST_BYTES or slab_bytes & (slab_bytes - 1):
            raise ConfigError(f"slab_bytes is {slab_bytes}; use a power of two, {SMALLEST_BYTES} or more")
        if max_bytes < slab_bytes:
            raise ConfigError(f"max_bytes is {max_bytes}, less than one slab of {slab_bytes} bytes")
        self.name = text(name, "name")
        self.slab_bytes = slab_bytes
        self.max_bytes = max_bytes
        self._allocate = allocate or (lambda nbytes, slab: engine.allocate(nbytes, name=slab, prefault=True))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._slabs: list[_Slab] = []
        self._retired: list[_Slab] = []
        self._growing = False
        self._slabs_made = 0
        # For each size the free blocks, as an ordered set: what was freed last is used first, still warm.
        self._free: dict[int, dict[_Block, None]] = {}
        # Those of them that may have a free neighbour: joining them waits until somebody needs more.
        self._loose: dict[_Block, None] = {}
        self._waiters: deque[_Waiter] = deque()
        self._buffers = self._held_bytes = self._peak_bytes = 0
        self._closed = False

    def acquire(self, nbytes: int, timeout_s: float = 10.0) -> PooledBuffer:
        """Take a buffer; wait for one to come free when the pool has reached its limit.

        Raises ConfigError for a size that no slab can hold, PoolExhausted when none came free within
        ``timeout_s``, RegionClosed when the pool is closed, and what allocating a slab raises.
        """
        if not 0 < number(nbytes, "nbytes") <= self.slab_bytes:
            raise ConfigError(
                f"pool {self.name!r} has buffers of 1 to {self.slab_bytes} bytes, not {nbytes}; "
                "raise slab_bytes"
            )
        seconds(timeout_s, "timeout_s")
        size = max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        waiter = _Waiter(size)
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._require_open()
            self._waiters.append(waiter)
            try:
                self._serve()
                while waiter.block is None:
                    if self._may_grow():
                        self._grow()
                    elif not self._wait(deadline_s):
                        raise PoolExhausted(self._why_exhausted(nbytes, timeout_s))
                    self._require_open()
            except BaseException:
                self._leave(waiter)
                raise
        return PooledBuffer(self, waiter.block, nbytes)

    def usage(self) -> PoolUsage:
        """What is in use now."""
        with self._lock:
            return PoolUsage(
                self._buffers,
                self._held_bytes,
                len(self._slabs) * self.slab_bytes,
                self.max_bytes,
                len(self._slabs),
                len(self._waiters),
                self._peak_bytes,
            )

    def trim(self) -> int:
        """Give slabs without a buffer in use back to the system; return their bytes.

        Raises RegionBusy when peers still use one; the next ``trim()`` or ``close()`` tries it again.
        """
        with self._lock:
            self._join()
            idle = [slab for slab in self._slabs if not slab.held]
            for slab in idle:
                self._slabs.remove(slab)
                del self._free[self.slab_bytes][_Block(slab, 0, self.slab_bytes)]
            self._retired += idle
        self._close_retired()
        return len(idle) * self.slab_bytes

    def close(self, timeout_s: float = 10.0) -> None:
        """Take no more callers, wait for all buffers to come back, close the regions. Safe to call twice.

        Raises RegionBusy when buffers are still out after ``timeout_s``, or peers still use one of the
        regions; call ``close()`` again then.
        """
        deadline_s = time.monotonic() + seconds(timeout_s, "timeout_s")
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            while self._buffers or self._growing:
                if not self._wait(deadline_s):
                    raise RegionBusy(
                        f"pool {self.name!r} has {self._buffers} buffers ({self._held_bytes} bytes) in use "
                        f"still after {timeout_s:g} s; release them and close it again"
                    )
            self._retired += self._slabs
            self._slabs.clear()
            self._free.clear()
            self._loose.clear()
        self._close_retired(deadline_s)

    def _close_retired(self, deadline_s: float | None = None) -> None:
        """Close what is no longer handed out. A region may be closed twice, so threads may do so together."""
        while self._retired:
            slab = self._retired[0]
            slab.region.close(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
            with self._lock:
                if slab in self._retired:
                    self._retired.remove(slab)
                self._changed.notify_all()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release(self, buffer: PooledBuffer) -> None:
        with self._lock:
            block, buffer._block = buffer._block, None
            if block is None:
                raise RegionClosed(
                    f"a buffer of {buffer.nbytes} bytes of pool {self.name!r} is released twice; "
                    "the second time it may be somebody else's"
                )
            self._put_back(block)
            self._serve()
            self._changed.notify_all()

    # ---- all below hold the lock

    def _require_open(self) -> None:
        if self._closed:
            raise RegionClosed(f"pool {self.name!r} was closed")

    def _wait(self, deadline_s: float) -> bool:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
        return True

    def _may_grow(self) -> bool:
        if self._growing:  # one at a time: what comes may be enough for several waiters
            return False
        return (len(self._slabs) + len(self._retired) + 1) * self.slab_bytes <= self.max_bytes

    def _grow(self) -> None:
        """Add a slab. The lock is free meanwhile: backing memory with pages takes long."""
        self._growing = True
        self._slabs_made += 1
        name = f"{self.name}-{self._slabs_made}"
        self._lock.release()
        region = None
        try:
            region = self._allocate(self.slab_bytes, name)
        finally:
            self._lock.acquire()
            self._growing = False
            self._changed.notify_all()
            if region is not None:
                slab = _Slab(region)
                self._slabs.append(slab)
                self._add_free(_Block(slab, 0, self.slab_bytes))
                self._serve()

    def _serve(self) -> None:
        """Hand free blocks to those who wait, strictly in order: a large request is never starved."""
        while self._waiters and not self._closed:
            size = self._waiters[0].size
            block = self._cut(size)
            if block is None:
                self._join()
                block = self._cut(size)
            if block is None:
                return
            self._waiters.popleft().block = block
            block.slab.held += 1
            self._buffers += 1
            self._held_bytes += block.size
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
            self._changed.notify_all()

    def _leave(self, waiter: _Waiter) -> None:
        """A caller gives up; what it was handed meanwhile, or blocked behind it, goes to the next ones."""
        if waiter.block is None:
            self._waiters.remove(waiter)
        else:
            self._put_back(waiter.block)
        self._serve()

    def _cut(self, size: int) -> _Block | None:
        """Take a block of exactly ``size``, halving the smallest free one that is large enough."""
        found = size
        while not self._free.get(found):
            found *= 2
            if found > self.slab_bytes:
                return None
        block, _ = self._free[found].popitem()
        self._loose.pop(block, None)
        while found > size:
            found //= 2
            self._add_free(_Block(block.slab, block.offset + found, found))
        return block if block.size == size else _Block(block.slab, block.offset, size)

    def _add_free(self, block: _Block) -> None:
        self._free.setdefault(block.size, {})[block] = None

    def _put_back(self, block: _Block) -> None:
        block.slab.held -= 1
        self._buffers -= 1
        self._held_bytes -= block.size
        self._add_free(block)
        self._loose[block] = None

    def _join(self) -> None:
        """Join what came back since the last time with its free neighbours; each block is looked at once."""
        while self._loose:
            block, _ = self._loose.popitem()
            slab, offset, size = block
            # The other half of what a block was cut from lies where its offset has one bit flipped.
            while size < self.slab_bytes and (other := _Block(slab, offset ^ size, size)) in self._free[size]:
                del self._free[size][other], self._free[size][_Block(slab, offset, size)]
                self._loose.pop(other, None)
                offset &= ~size
                size *= 2
                self._add_free(_Block(slab, offset, size))

    def _why_exhausted(self, nbytes: int, timeout_s: float) -> str:
        return (
            f"no {nbytes} bytes came free in pool {self.name!r} within {timeout_s:g} s: "
            f"{self._buffers} buffers hold {self._held_bytes} of at most {self.max_bytes} bytes, "
            f"{len(self._waiters)} callers wait; release buffers sooner or raise max_bytes"
        )
