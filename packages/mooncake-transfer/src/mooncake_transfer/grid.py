"""How callers say which bytes to move: rows of an array, or a grid that needs no row per block."""

from __future__ import annotations

import operator

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_transfer._errors import ConfigError

__all__ = ["Blocks", "Grid", "GridSide"]

Index = npt.NDArray[np.uint64]


class GridSide(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of a grid lie in one region. All in bytes, but ``index``.

    Attributes:
        index: number of each block; any integer sequence.
        stride: distance between blocks of neighbouring numbers.
        base: offset of block 0.
        outer_stride: distance between repetitions of the whole, for example between layers.
    """

    index: npt.ArrayLike
    stride: int
    base: int = 0
    outer_stride: int = 0


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one length at regular places, without a row for each: the shape of a paged KV cache.

    Block (o, i), for o < ``outer`` and i < len(index), has ``length`` bytes at
    ``base + o * outer_stride + index[i] * stride`` of either side.

    Attributes:
        local: places in the local region.
        remote: places in the remote one; as many indices.
        length: bytes of a block.
        outer: how often the whole is repeated.
    """

    local: GridSide
    remote: GridSide
    length: int
    outer: int = 1

    def arguments(self) -> tuple[int, int, int, int, int, Index, int, int, int, Index]:
        """Return the numbers as the core takes them. Raises ConfigError for negative or huge ones."""
        return (
            _number(self.length, "length"),
            _number(self.outer, "outer"),
            *_side(self.local, "local"),
            *_side(self.remote, "remote"),
        )


Blocks = npt.ArrayLike | Grid


def _side(side: GridSide, name: str) -> tuple[int, int, int, Index]:
    index = np.asarray(side.index)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise ConfigError(f"{name}.index must be a row of integers, got shape {index.shape} of {index.dtype}")
    if index.size and index.dtype.kind == "i" and index.min() < 0:
        raise ConfigError(f"{name}.index holds the negative number {index.min()}")
    return (
        _number(side.base, f"{name}.base"),
        _number(side.stride, f"{name}.stride"),
        _number(side.outer_stride, f"{name}.outer_stride"),
        np.ascontiguousarray(index, dtype=np.uint64),
    )


def _number(value: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} of the grid is {value!r}; it must be an integer") from None
    if not 0 <= number < 1 << 64:
        raise ConfigError(f"{name} of the grid is {value}; it must be from 0 to 2^64 - 1 bytes")
    return number


def as_blocks(blocks: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return rows of local offset, remote offset and length as the core takes them. Raises ConfigError."""
    array = np.asarray(blocks)
    if array.size == 0:
        return np.empty((0, 3), dtype=np.uint64)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"blocks must be an N x 3 integer array (local offset, remote offset, length), "
            f"got shape {array.shape} of {array.dtype}"
        )
    if array.dtype.kind == "i" and array.min() < 0:
        raise ConfigError("blocks holds a negative offset or length")
    return np.ascontiguousarray(array, dtype=np.uint64)
