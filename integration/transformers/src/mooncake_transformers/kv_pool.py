"""A pool of KV blocks in one piece of memory that the transfer engine can read and write.

The pool hands out block numbers and counts who uses them; tensors over the memory are views, never copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from mooncake_transformers._errors import ConfigError
from mooncake_transformers.kv_layout import KVLayout

__all__ = ["KVPool", "LayerViews"]


@dataclass(frozen=True, slots=True)
class LayerViews:
    """One layer's keys and values over all blocks, each of shape ``[blocks, block_tokens * heads * dim]``."""

    keys: torch.Tensor
    values: torch.Tensor


class KVPool:
    """Blocks of ``layout`` over ``memory`` (a writable buffer that outlives the pool). Thread-safe.

    A block is free, or has a count of users; it returns to the free list when the last one lets go of it.
    What a block holds is undefined until it is written.
    """

    def __init__(self, layout: KVLayout, memory: memoryview) -> None:
        self.layout = layout
        self.memory = memory
        self.block_count = memory.nbytes // layout.block_bytes
        if self.block_count < 1:
            raise ConfigError(
                f"a KV pool of {memory.nbytes} bytes holds no block of {layout.block_bytes} bytes "
                f"({layout.block_tokens} tokens); raise kv_pool_bytes or lower block_tokens"
            )
        self.views = _layer_views(layout, memory, self.block_count)
        self._lock = threading.Lock()
        # Popped from the end, so that a fresh pool hands out ascending neighbours: they merge into long
        # copies.
        self._free = list(range(self.block_count - 1, -1, -1))
        self._users = [0] * self.block_count
        self._on_freed: Callable[[], None] | None = None

    @property
    def free_count(self) -> int:
        """Blocks nobody uses right now."""
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole pool holds."""
        return self.block_count * self.layout.block_tokens

    def offset(self, block: int) -> int:
        """Where the block starts, in bytes from the start of the memory."""
        return block * self.layout.block_bytes

    def touch(self, nbytes: int) -> None:
        """Back the first ``nbytes`` of the memory by real pages before they are used. Writes zeros."""
        memory = torch.frombuffer(self.memory, dtype=torch.uint8)
        memory[:nbytes].zero_()

    def try_allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one user each, or None when fewer are free. Never waits."""
        with self._lock:
            if count > len(self._free):
                return None
            taken = [self._free.pop() for _ in range(count)]
            for block in taken:
                self._users[block] = 1
            return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one user to each of the blocks, which must be in use."""
        with self._lock:
            for block in blocks:
                assert self._users[block] > 0, f"block {block} is free"
                self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one user from each of the blocks; those without any are free again."""
        with self._lock:
            # Backwards, so that the next allocation meets them in ascending order again.
            for block in reversed(blocks):
                assert self._users[block] > 0, f"block {block} is free already"
                self._users[block] -= 1
                if self._users[block] == 0:
                    self._free.append(block)
            notify = self._on_freed
        if notify is not None and blocks:
            notify()

    def on_freed(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` (from any thread, without the pool's lock) after blocks were released; None ends
        that.
        """
        self._on_freed = callback


def _layer_views(layout: KVLayout, memory: memoryview, block_count: int) -> list[LayerViews | None]:
    """Strided views of every layer's keys and values over all blocks."""
    itemsize = layout.dtype.itemsize
    stride = layout.block_bytes // itemsize
    flat = torch.frombuffer(memory, dtype=layout.dtype, count=block_count * stride)
    views: list[LayerViews | None] = []
    start = 0
    for shape in layout.layers:
        if shape is None:
            views.append(None)
            continue
        key_width = layout.block_tokens * shape.key_width
        value_width = layout.block_tokens * shape.value_width
        keys = flat.as_strided((block_count, key_width), (stride, 1), start)
        values = flat.as_strided((block_count, value_width), (stride, 1), start + key_width)
        views.append(LayerViews(keys, values))
        start += key_width + value_width
    assert start <= stride, "layers do not fit in their block"
    return views
