"""How full the allocator gets before something does not fit, with objects that come and go at random."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from mooncake_store._core import BestFit
from mooncake_store.config import MAX_EXTENTS, StoreConfig

__all__ = ["WORKLOADS", "Fill", "Workload", "measure"]

CAPACITY_BYTES = 8 << 30
KIB, MIB = 1 << 10, 1 << 20
FREED = 0.1  # of the capacity, whenever something does not fit
SEED = 20251
GLM_BYTES, INDEX_BYTES = (
    3_274_752,
    658_432,
)  # a block of GLM's KV cache, and of a sparse-attention index beside it


def _log_uniform(random: Random) -> int:
    return round(math.exp(random.uniform(math.log(256 * KIB), math.log(32 * MIB))))


def _bimodal(random: Random) -> int:
    large = random.random() < 0.5
    return random.randint(round(10.5 * MIB), round(12.4 * MIB)) if large else random.randint(1, 10_000)


@dataclass(frozen=True)
class Workload:
    """Sizes of objects. With ``before``, the pool was full of those when they began to come."""

    name: str
    at_least: float
    nbytes: Callable[[Random], int]
    before: Callable[[Random], int] | None = None


WORKLOADS = (
    Workload("one size: 3,274,752 B", 99.0, lambda random: GLM_BYTES),
    Workload("one size: 1.1 x 2 MiB", 99.0, lambda random: round(1.1 * 2 * MIB)),
    Workload(
        "DSA pair: 3,274,752 B and 658,432 B", 99.0, lambda random: random.choice((GLM_BYTES, INDEX_BYTES))
    ),
    Workload("log-uniform 256 KiB to 32 MiB", 95.0, _log_uniform),
    Workload("RL mix: 10.5 to 12.4 MiB and up to 10 kB", 98.0, _bimodal),
    Workload(
        "model swap: 2.2 MiB, then 5.3 MiB",
        96.0,
        lambda random: round(5.3 * MIB),
        before=lambda random: round(2.2 * MIB),
    ),
)


@dataclass(frozen=True)
class Fill:
    """Per cent of the capacity that was in use, as requested, whenever an allocation did not fit."""

    mean: float
    least: float
    failures: int
    us_per_allocation: float


class _Pool:
    def __init__(self) -> None:
        self.space = BestFit(CAPACITY_BYTES, StoreConfig().granule_bytes)
        self.live: list[tuple[int, list[tuple[int, int]]]] = []
        self.live_bytes = 0
        self.random = Random(SEED)
        self.fills: list[float] = []

    def put(self, nbytes: int) -> None:
        pieces = self.space.allocate(nbytes, MAX_EXTENTS)
        if pieces is None:
            self.fills.append(100.0 * self.live_bytes / CAPACITY_BYTES)
            kept_bytes = self.live_bytes - FREED * CAPACITY_BYTES
            while self.live_bytes > kept_bytes:
                self.free_one()
            pieces = self.space.allocate(nbytes, MAX_EXTENTS)
            assert pieces is not None, f"{nbytes} bytes do not fit into a pool with a tenth of its bytes free"
        self.live.append((nbytes, pieces))
        self.live_bytes += nbytes

    def free_one(self) -> None:
        at = self.random.randrange(len(self.live))
        self.live[at], self.live[-1] = self.live[-1], self.live[at]
        nbytes, pieces = self.live.pop()
        self.live_bytes -= nbytes
        for piece in pieces:
            self.space.free(*piece)


def measure(workload: Workload, steps: int) -> Fill:
    """Allocate so many objects; whenever one does not fit, free a tenth of the pool at random first."""
    pool = _Pool()
    if workload.before is not None:
        while not pool.fills:
            pool.put(workload.before(pool.random))
        pool.fills.clear()
    started_s = time.perf_counter()
    for _ in range(steps):
        pool.put(workload.nbytes(pool.random))
    took_s = time.perf_counter() - started_s
    return Fill(statistics.fmean(pool.fills), min(pool.fills), len(pool.fills), 1e6 * took_s / steps)
