"""How the KV cache of one block of tokens lies in memory: ``[layer][k|v][token][head][dim]``, without gaps.

Shapes are learnt from the model itself (see ``model.probe_layers``), because keys and values may differ in
heads and width, and layers may differ from each other or hold no cache at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["BLOCK_ALIGNMENT_BYTES", "KVLayout", "LayerShape"]

# Blocks start on cache lines, so that the copy kernels of the drivers stay on their aligned paths.
BLOCK_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and width of one layer's keys and values."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def key_width(self) -> int:
        """Elements of one token's keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of one token's values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class KVLayout:
    """Layout of a block. ``layers[i]`` is None where layer ``i`` of the model keeps no cache of its own."""

    layers: tuple[LayerShape | None, ...]
    dtype: torch.dtype
    block_tokens: int

    @cached_property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        width = sum(shape.key_width + shape.value_width for shape in self.layers if shape is not None)
        return width * self.dtype.itemsize

    @cached_property
    def block_bytes(self) -> int:
        """Distance between two blocks, a multiple of BLOCK_ALIGNMENT_BYTES."""
        return -(-self.token_bytes * self.block_tokens // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the last one maybe in part."""
        return -(-tokens // self.block_tokens)

    @cached_property
    def description(self) -> str:
        """The layout in words that two workers can compare. Equal text means blocks are interchangeable."""
        runs: list[tuple[str, int]] = []
        for shape in self.layers:
            words = (
                "-"
                if shape is None
                else (f"k{shape.key_heads}x{shape.key_dim}v{shape.value_heads}x{shape.value_dim}")
            )
            count = runs.pop()[1] if runs and runs[-1][0] == words else 0
            runs.append((words, count + 1))
        layers = ",".join(f"{count}*{words}" for words, count in runs)
        return f"lkvthd1/{str(self.dtype).removeprefix('torch.')}/b{self.block_tokens}/{layers}"
