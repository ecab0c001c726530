"""The KV cache of one sequence, as transformers sees it while the model computes.

Each layer keeps its keys and values in one buffer ``[token, head, dim]`` that grows by doubling, so a
decoding step writes one row and copies nothing else. The same order of axes is used in a pool block, so
loading and saving blocks are plain row copies. Every layer keeps all tokens, also where the model attends to
a window only: transformers then masks by position, and any block of any prompt can be reused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from mooncake_transformers.kv_layout import LayerShape
from mooncake_transformers.kv_pool import KVPool

__all__ = ["ContiguousLayer", "SequenceCache"]

MIN_CAPACITY_TOKENS = 64


class ContiguousLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of one sequence (batch size 1). Buffers are made at the first update, or by ``allocate``."""

    is_sliding = False
    is_croppable = False

    def __init__(self, capacity_tokens: int = MIN_CAPACITY_TOKENS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.capacity_tokens = max(capacity_tokens, MIN_CAPACITY_TOKENS)
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None

    def allocate(self, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> None:
        """Make the buffers before any token is there, for a layer that is loaded from blocks."""
        tokens = self.capacity_tokens
        self.key_buffer = torch.empty((tokens, shape.key_heads, shape.key_dim), dtype=dtype, device=device)
        self.value_buffer = torch.empty(
            (tokens, shape.value_heads, shape.value_dim), dtype=dtype, device=device
        )
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffers from the first states, shaped ``[1, heads, tokens, dim]``."""
        shape = LayerShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3]
        )
        self.allocate(shape, key_states.dtype, key_states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states ``[1, heads, tokens, dim]`` and return those of the whole sequence, as views."""
        assert key_states.shape[0] == 1, "a sequence cache holds one sequence"
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        self._reserve(end)
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        self.key_buffer[start:end].copy_(key_states[0].transpose(0, 1))
        self.value_buffer[start:end].copy_(value_states[0].transpose(0, 1))
        self.length = end
        self.keys = self.key_buffer[:end].transpose(0, 1).unsqueeze(0)
        self.values = self.value_buffer[:end].transpose(0, 1).unsqueeze(0)
        if start == 0:
            # The states as they came lie head by head, which attention over a long prompt reads faster.
            return key_states, value_states
        return self.keys, self.values

    def _reserve(self, tokens: int) -> None:
        if tokens <= self.capacity_tokens:
            return
        while self.capacity_tokens < tokens:
            self.capacity_tokens *= 2
        self.key_buffer = _grown(self.key_buffer, self.length, self.capacity_tokens)
        self.value_buffer = _grown(self.value_buffer, self.length, self.capacity_tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of keys the next ``query_length`` tokens attend to, and the position of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum: the buffers grow."""
        return -1


class SequenceCache(Cache):
    """The cache of one sequence over all layers of a model.

    Owned by one thread at a time; handing it over is up to the caller.
    """

    def __init__(self, layers: Sequence[ContiguousLayer | DummyLayer]) -> None:
        super().__init__(layers=list(layers))

    @property
    def length(self) -> int:
        """Tokens held."""
        return next((layer.length for layer in self.layers if isinstance(layer, ContiguousLayer)), 0)

    @torch.inference_mode()
    def load(self, pool: KVPool, blocks: Sequence[int], tokens: int, device: torch.device) -> None:
        """Fill the empty cache with the first ``tokens`` tokens of ``blocks``, in this order."""
        assert self.length == 0, "blocks are loaded into an empty cache"
        assert pool.layout.blocks_for(tokens) == len(blocks), "the blocks do not fit the token count"
        index = torch.tensor(blocks, dtype=torch.int64)
        rows = len(blocks) * pool.layout.block_tokens
        for layer, shape, views in zip(self.layers, pool.layout.layers, pool.views, strict=True):
            if shape is None or views is None:
                continue
            assert isinstance(layer, ContiguousLayer)
            if not layer.is_initialized:
                layer.capacity_tokens = max(layer.capacity_tokens, rows)
                layer.allocate(shape, pool.layout.dtype, device)
            assert layer.key_buffer is not None
            assert layer.value_buffer is not None
            _gather(views.keys, index, layer.key_buffer[:rows])
            _gather(views.values, index, layer.value_buffer[:rows])
            layer.length = tokens

    @torch.inference_mode()
    def save(self, pool: KVPool, blocks: Sequence[int], first_block: int) -> None:
        """Write the sequence's blocks number ``first_block``, ``first_block + 1``, … into the pool's
        ``blocks``.

        The last one may be filled in part: the rest of it is undefined.
        """
        if not blocks:
            return
        index = torch.tensor(blocks, dtype=torch.int64)
        begin = first_block * pool.layout.block_tokens
        end = begin + len(blocks) * pool.layout.block_tokens
        assert begin < self.length, "the blocks start behind the last token"
        for layer, views in zip(self.layers, pool.views, strict=True):
            if views is None:
                continue
            assert isinstance(layer, ContiguousLayer)
            layer._reserve(end)
            assert layer.key_buffer is not None
            assert layer.value_buffer is not None
            _scatter(views.keys, index, layer.key_buffer[begin:end])
            _scatter(views.values, index, layer.value_buffer[begin:end])


def _grown(buffer: torch.Tensor | None, used: int, capacity: int) -> torch.Tensor:
    assert buffer is not None
    larger = torch.empty((capacity, *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
    larger[:used].copy_(buffer[:used])
    return larger


def _gather(pool_view: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy whole blocks ``pool_view[index]`` into ``rows`` (contiguous, on any device)."""
    target = rows.view(len(index), -1)
    if target.device == pool_view.device:
        torch.index_select(pool_view, 0, index, out=target)
    else:
        target.copy_(torch.index_select(pool_view, 0, index))


def _scatter(pool_view: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy ``rows`` (contiguous, on any device) into whole blocks ``pool_view[index]``."""
    pool_view.index_copy_(0, index, rows.view(len(index), -1).to(pool_view.device))
