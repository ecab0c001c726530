"""Memory by its address, as buffers for connections and as tensors for reductions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["Scratch", "copy_into", "parts_of", "tensor_of", "view_at"]

_SHORT = 16 << 10


def view_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of memory that the caller keeps alive."""
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def tensor_of(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [n] over a view."""
    if len(memory) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype)


def copy_into(to: memoryview, source: memoryview) -> None:
    """Copy as many bytes as `to` has, if it is not the same memory. Other threads go on meanwhile."""
    if len(to) < _SHORT:
        to[:] = source[: len(to)]
        return
    target, origin = tensor_of(to, torch.uint8), tensor_of(source[: len(to)], torch.uint8)
    if target.data_ptr() != origin.data_ptr():
        target.copy_(origin)


def parts_of(memory: memoryview, nbytes: int) -> list[memoryview]:
    """Cut a view into pieces of at most so many bytes; no piece of an empty one."""
    return [memory[begin : begin + nbytes] for begin in range(0, len(memory), nbytes)]


class Scratch:
    """Memory that is used again and again: its pages are touched once."""

    def __init__(self) -> None:
        self._blocks: dict[str, torch.Tensor] = {}

    def take(self, name: str, nbytes: int) -> memoryview:
        """Return so many bytes, which the next `take` of that name gives out again."""
        block = self._blocks.get(name)
        if block is None or block.numel() < nbytes:
            block = self._blocks[name] = torch.empty(max(nbytes, 4096), dtype=torch.uint8)
        return view_at(block.data_ptr(), nbytes)

    def split(self, name: str, sizes: Sequence[int]) -> list[memoryview]:
        """Return a piece for each size, one behind the other."""
        whole, pieces, at = self.take(name, sum(sizes)), [], 0
        for size in sizes:
            pieces.append(whole[at : at + size])
            at += size
        return pieces
