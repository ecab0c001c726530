"""The cache of a fake worker: which blocks it holds, and the KV events that say so."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Sequence

import xxhash

from mooncake_store.kv_events.publisher import KVEventPublisher
from mooncake_store.kv_events.wire import MEDIUM_CPU, BlockRemoved, BlockStored

__all__ = ["FakeCache"]


class FakeCache:
    """Holds full blocks by a hash of their whole prefix. The hashes differ between instances, as those of
    engines with different seeds do."""

    def __init__(self, publisher: KVEventPublisher, block_tokens: int) -> None:
        self._publisher = publisher
        self._block_tokens = block_tokens
        self._seed = secrets.token_bytes(8)
        self._held: set[int] = set()

    def store(self, tokens: Sequence[int]) -> int:
        """Hold the full blocks of a prompt. Returns how many leading tokens were held before; publishes the
        rest."""
        names = list(self._names(tokens))
        cached = 0
        while cached < len(names) and names[cached] in self._held:
            cached += 1
        if cached < len(names):
            self._held.update(names[cached:])
            size = self._block_tokens
            event = BlockStored(
                block_hashes=list(names[cached:]),
                parent_block_hash=names[cached - 1] if cached else None,
                token_ids=list(tokens[cached * size : len(names) * size]),
                block_size=size,
                medium=MEDIUM_CPU,
            )
            self._publisher.publish([event])
        return cached * self._block_tokens

    def evict(self, tokens: Sequence[int]) -> None:
        """Drop the blocks of a prompt and publish it."""
        gone = [name for name in self._names(tokens) if name in self._held]
        self._held.difference_update(gone)
        if gone:
            self._publisher.publish([BlockRemoved(block_hashes=list(gone), medium=MEDIUM_CPU)])

    def _names(self, tokens: Sequence[int]) -> Iterator[int]:
        prefix = self._seed
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            prefix += struct.pack(f"<{self._block_tokens}I", *tokens[start : start + self._block_tokens])
            yield xxhash.xxh3_64_intdigest(prefix)
