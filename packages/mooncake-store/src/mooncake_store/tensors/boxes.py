"""Which bytes of a tensor's shards make which part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_store._errors import ConfigError
from mooncake_store.parts import Uints

__all__ = ["Shard", "overlap", "shape_of"]


@dataclass(frozen=True)
class Shard:
    """One of ``size`` shards of a tensor along one dimension, as tensor parallelism cuts weights and heads.

    Where the dimension cannot be divided, shards differ by at most one: rank r has the indices from
    r * extent // size up to (r + 1) * extent // size.
    """

    dim: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.dim < 0 or self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"{self} makes no sense: dim >= 0 and 0 <= rank < size are needed")

    def bounds(self, extent: int) -> tuple[int, int]:
        """First index, and one behind the last, of a dimension of this extent."""
        return self.rank * extent // self.size, (self.rank + 1) * extent // self.size


def shape_of(whole: Sequence[int], shard: Shard) -> tuple[int, ...]:
    """The shape of a shard. Raises ConfigError when the tensor has no such dimension."""
    if shard.dim >= len(whole):
        raise ConfigError(f"{shard} is of dimension {shard.dim}; the tensor's shape is {tuple(whole)}")
    begin, end = shard.bounds(whole[shard.dim])
    return (*whole[: shard.dim], end - begin, *whole[shard.dim + 1 :])


def overlap(whole: Sequence[int], itemsize: int, stored: Shard, wanted: Shard) -> Uints:
    """What two shards of a tensor have in common: rows of offset in ``stored``, offset in ``wanted``, bytes.

    Both are contiguous tensors. Rows are few where both are cut along the first dimension.
    """
    starts, ends = _box(whole, stored), _box(whole, wanted)
    begin = [max(a[0], b[0]) for a, b in zip(starts, ends, strict=True)]
    end = [min(a[1], b[1]) for a, b in zip(starts, ends, strict=True)]
    if any(low >= high for low, high in zip(begin, end, strict=True)):
        return np.empty((0, 3), dtype=np.uint64)
    # Behind the last dimension that either is cut in, bytes are contiguous on both sides.
    cut = max(stored.dim, wanted.dim)
    run = itemsize * math.prod(whole[cut + 1 :])
    rows = np.zeros((1, 2), dtype=np.uint64)
    for dim in range(cut + 1):
        strides = [math.prod(_extents(box)[dim + 1 : cut + 1]) * run for box in (starts, ends)]
        firsts = [begin[dim] - box[dim][0] for box in (starts, ends)]
        count = 1 if dim == cut else end[dim] - begin[dim]
        steps = np.arange(count, dtype=np.uint64)[:, None] + np.array(firsts, dtype=np.uint64)
        rows = (rows[:, None, :] + (steps * np.array(strides, dtype=np.uint64))[None]).reshape(-1, 2)
    nbytes = np.full((len(rows), 1), (end[cut] - begin[cut]) * run, dtype=np.uint64)
    return np.concatenate((rows, nbytes), axis=1)


def _box(whole: Sequence[int], shard: Shard) -> list[tuple[int, int]]:
    return [shard.bounds(extent) if dim == shard.dim else (0, extent) for dim, extent in enumerate(whole)]


def _extents(box: Sequence[tuple[int, int]]) -> list[int]:
    return [end - begin for begin, end in box]
