"""Memory of an owner in which values of its tiers lie for a while, so that others can read them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_store._core import BestFit
from mooncake_store.tiers.codec import BLOCK_BYTES
from mooncake_store.tiers.contract import Bytes, Read, ReadOutcome, Tier
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import DriverUnavailable, RegionBusy

__all__ = ["Lease", "Staging"]

# For peers that still read, of which none is told that its lease is over.
CLOSE_WAIT_S = 0.1

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Lease:
    """What one call has staged.

    Attributes:
        offsets: where each value begins in the region; -1 for what is not there.
        sizes: of the values.
        missing: places of what the tier does not have, or not any more.
        holds: how many use it; the last one frees it.
    """

    id: int
    region: Region
    descriptor: bytes
    offsets: list[int]
    sizes: list[int]
    deadline_s: float
    pieces: list[tuple[int, int]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    holds: int = 1


class Staging:
    """One region, given out in pieces. Larger values get a region of their own. Thread-safe."""

    def __init__(self, engine: TransferEngine, nbytes: int, ttl_s: float) -> None:
        """Raises MemoryUnavailable of the engine."""
        self._engine = engine
        self._ttl_s = ttl_s
        self._changed = threading.Condition()
        self._region = engine.allocate(nbytes, name="store-tier-staging")
        self._descriptor = _readable(self._region)
        self._free = BestFit(nbytes, BLOCK_BYTES)
        self._leases: dict[int, Lease] = {}
        self._ids = itertools.count(1)
        self._closed = False
        self._to_close: list[Region] = []  # of large values that nobody reads any more

    @property
    def memory(self) -> Bytes:
        """All of it."""
        return np.frombuffer(self._region.view(), dtype=np.uint8)

    def stage(self, tier: Tier, reads: Sequence[tuple[bytes, int, int, int]], timeout_s: float) -> Lease:
        """Read as many records (digest, epoch, version, bytes) as there is room for, from the first on.

        Waits for room for the first of them. Of those that found none, the lease has no offsets.
        """
        deadline_s = time.monotonic() + timeout_s
        self._close_large()
        lease = self._take([nbytes for *_, nbytes in reads], deadline_s)
        array = np.frombuffer(lease.region.view(), dtype=np.uint8)
        asked = [
            Read(digest, array[offset : offset + nbytes], (epoch, version))
            for (digest, epoch, version, nbytes), offset in zip(reads, lease.offsets, strict=False)
        ]
        outcomes = tier.read(asked, max(0.0, deadline_s - time.monotonic()))
        with self._changed:
            for at, outcome in enumerate(outcomes):
                if outcome is ReadOutcome.FAILED and lease.pieces:
                    # It may still arrive: this piece is never given out again.
                    lease.pieces = [piece for piece in lease.pieces if piece[0] != lease.offsets[at]]
                if outcome is not ReadOutcome.GOOD:
                    lease.offsets[at] = -1
                if outcome in (ReadOutcome.MISS, ReadOutcome.CORRUPT):
                    lease.missing.append(at)
            lease.deadline_s = time.monotonic() + self._ttl_s
            self._leases[lease.id] = lease
        return lease

    def _take(self, sizes: list[int], deadline_s: float) -> Lease:
        first = sizes[0]
        if first > self._free.capacity_bytes:
            region = self._engine.allocate(first, name="store-tier-staging-large")
            return Lease(next(self._ids), region, _readable(region), [0], [first], deadline_s)
        with self._changed:
            while True:
                self._expire()
                pieces = []
                for nbytes in sizes:
                    found = self._free.allocate(max(nbytes, 1), 1)
                    if found is None:
                        break
                    pieces += found
                left_s = deadline_s - time.monotonic()
                if pieces or left_s <= 0 or self._closed:
                    break
                self._changed.wait(min(left_s, self._ttl_s / 4))
        offsets = [offset for offset, _ in pieces]
        taken = sizes[: len(offsets)]
        return Lease(next(self._ids), self._region, self._descriptor, offsets, taken, deadline_s, pieces)

    def hold(self, lease: Lease) -> None:
        """One more uses it."""
        with self._changed:
            lease.holds += 1

    def release(self, lease: Lease) -> None:
        """One less uses it."""
        with self._changed:
            self._release(lease)
        self._close_large()

    def give_up(self, lease: Lease) -> None:
        """A driver may use its memory for longer than anybody waits: it is never given out again."""
        with self._changed:
            lease.pieces = []

    def end(self, lease_id: int) -> bool:
        """Who asked for it has read it; whether it was there until now."""
        with self._changed:
            self._expire()
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                self._release(lease)
        self._close_large()
        return lease is not None

    def close(self) -> None:
        """Give the memory back."""
        with self._changed:
            self._closed = True
            for lease in self._leases.values():
                self._release(lease)
            self._leases.clear()
            self._changed.notify_all()
        self._close_large()
        self._region.close()

    def _expire(self) -> None:
        now_s = time.monotonic()
        for lease in [lease for lease in self._leases.values() if lease.deadline_s < now_s]:
            del self._leases[lease.id]
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        lease.holds -= 1
        if lease.holds:
            return
        if lease.region is not self._region:
            self._to_close.append(lease.region)
        for offset, nbytes in lease.pieces:
            self._free.free(offset, nbytes)
        lease.pieces = []
        self._changed.notify_all()

    def _close_large(self) -> None:
        """Not under the lock: it waits for peers that are late. What they still use is tried again later."""
        with self._changed:
            closing, self._to_close = self._to_close, []
        busy = []
        for region in closing:
            try:
                region.close(CLOSE_WAIT_S)
            except RegionBusy as error:
                log.info("memory of a tier's value is given back later: %s", error)
                busy.append(region)
        with self._changed:
            self._to_close += busy


def _readable(region: Region) -> bytes:
    try:
        return region.descriptor("r")
    except DriverUnavailable:  # none of this engine's drivers knows lesser rights
        return region.descriptor()
