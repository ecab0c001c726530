"""How callers say which bytes to move: rows of an array, or a grid that needs no row per block."""

from __future__ import annotations

import operator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_transfer._arguments import instance, shown
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

    def __post_init__(self) -> None:
        """Raise ConfigError for what is no row of indices, or no number of bytes."""
        _indices(self.index, "index")
        for name in ("stride", "base", "outer_stride"):
            _number(getattr(self, name), name)


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

    def __post_init__(self) -> None:
        """Raise ConfigError for what is no side of a grid, or no number."""
        instance(self.local, GridSide, "local", "which says where the blocks lie")
        instance(self.remote, GridSide, "remote", "which says where the blocks lie")
        _number(self.length, "length")
        _number(self.outer, "outer")

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
    return (
        _number(side.base, f"{name}.base"),
        _number(side.stride, f"{name}.stride"),
        _number(side.outer_stride, f"{name}.outer_stride"),
        np.ascontiguousarray(_indices(side.index, f"{name}.index"), dtype=np.uint64),
    )


def _indices(given: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    index = _array(given, name)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise ConfigError(f"{name} must be a row of integers, got shape {index.shape} of {index.dtype}")
    if index.size and index.dtype.kind == "i" and index.min() < 0:
        raise ConfigError(f"{name} holds the negative number {index.min()}")
    return index


def _array(given: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:  # rows of several lengths, and what numpy cannot take
        raise ConfigError(f"{name} is no array of integers: {error}") from None


def _number(value: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} of the grid is {value!r}; it must be an integer") from None
    if not 0 <= number < 1 << 64:
        raise ConfigError(f"{name} of the grid is {value}; it must be from 0 to 2^64 - 1 bytes")
    return number


def _large(array: npt.NDArray[Any], blocks: npt.ArrayLike) -> npt.NDArray[Any]:
    """Take integers of 2^63 and more for what they are; numpy makes floats or objects of them."""
    exact = np.asarray(blocks, dtype=object)
    if not exact.size or any(isinstance(one, bool) or not isinstance(one, int) for one in exact.flat):
        return array
    for one in (min(exact.flat), max(exact.flat)):
        if not 0 <= one < 1 << 64:
            raise ConfigError(f"blocks holds {shown(one)}; it must be from 0 to 2^64 - 1 bytes")
    return exact.astype(np.uint64)


def as_blocks(blocks: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return rows of local offset, remote offset and length as the core takes them. Raises ConfigError."""
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.uint64 and blocks.shape[1:] == (3,):
        return np.ascontiguousarray(blocks)  # the usual kind, the fast way
    array = _array(blocks, "blocks")
    if array.dtype.kind not in "iu" and not isinstance(blocks, np.ndarray):
        array = _large(array, blocks)
    if array.size == 0 and array.dtype.kind != "O":
        return np.empty((0, 3), dtype=np.uint64)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"blocks must be an N x 3 integer array (local offset, remote offset, length), "
            f"got shape {array.shape} of {array.dtype}"
        )
    if array.dtype.kind == "i" and array.min() < 0:
        raise ConfigError("blocks holds a negative offset or length")
    return np.ascontiguousarray(array, dtype=np.uint64)
