"""Says what limits the rate that was found."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mooncake_transfer.bench.measurement import Result
from mooncake_transfer.bench.plan import shown_size

__all__ = ["verdict"]

BUSY = 0.9


def verdict(results: Sequence[Result], both_sides: bool, cores: int | None = None) -> str:
    """Name the fastest combination and what limits it, in one sentence.

    ``both_sides``: the target ran on this host, so its processor time is part of ``Result.cores``. ``cores``:
    how many this process may use (default: as the system says).
    """
    there = len(os.sched_getaffinity(0)) if cores is None else cores
    best = max(results, key=lambda result: result.gb_per_s)
    point = best.point
    sides = "both sides" if both_sides else "this side"
    what = f"{point.driver} {point.op} of {point.batch} x {shown_size(point.size)}"
    kept = f"{sides} kept {best.cores:.1f} of {there} cores busy"
    if best.cores >= BUSY * there:
        limit = "the cores are the limit"
    elif best.cores >= BUSY * point.threads and not both_sides:
        limit = "one core per thread is the limit: more threads may be faster"
    else:
        limit = f"driver {point.driver} is the limit, not the cores"
    return f"fastest: {what}, {best.gb_per_s:.3g} GB/s; {limit} ({kept})"
