"""KV blocks of prompts in the distributed store: looking them up, adding to them, and telling about it.

The store only ever saves work. When it fails, the prompt is computed in full; the failure is counted and
logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import groupby

from mooncake_store import Store, keys
from mooncake_store.errors import StoreError
from mooncake_store.kv_events.publisher import KVEventPublisher
from mooncake_store.kv_events.wire import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from mooncake_transfer import Region
from mooncake_transfer.errors import TransferError
from mooncake_transformers.kv_pool import KVPool
from mooncake_transformers.metrics import WorkerMetrics

__all__ = ["PrefixStore"]

logger = logging.getLogger(__name__)


class PrefixStore:
    """The store as far as prompts are concerned. Its calls block; they are made from one thread at a time.

    Events describe what lies in this worker's segment: they start with AllBlocksCleared, a block is announced
    after it was committed, and taken back when the store has evicted it.
    """

    def __init__(
        self,
        store: Store,
        pool: KVPool,
        region: Region,
        root: bytes,
        publisher: KVEventPublisher,
        metrics: WorkerMetrics,
    ) -> None:
        self._store = store
        self._pool = pool
        self._region = region
        self._publisher = publisher
        self._metrics = metrics
        self.root = root
        # The store's threads tell about evictions while publish() waits: both orders must end well.
        self._announcing = threading.Lock()
        self._lost_meanwhile: set[bytes] = set()
        self._clears = 0
        store.on_evicted(self._on_evicted)
        store.on_cleared(self._on_cleared)
        publisher.publish([AllBlocksCleared()])

    @property
    def lends(self) -> bool:
        """Whether this worker lends memory to the store."""
        return self._store.segment is not None

    def digests(self, token_ids: Sequence[int]) -> list[bytes]:
        """Names of the full blocks of a sequence."""
        return keys.block_digests(token_ids, self._pool.layout.block_tokens, self.root)

    def fetch(self, digests: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Read the longest stored prefix of ``digests`` into the first of ``blocks``; returns how many blocks
        it has.
        """
        assert len(digests) <= len(blocks), "a place for every block"
        if not digests:
            return 0
        try:
            with self._metrics.store_seconds.labels("fetch").time():
                return self._fetch(digests, blocks)
        except (StoreError, TransferError) as error:
            self._failed("fetch", error)
            return 0

    def _fetch(self, digests: Sequence[bytes], blocks: Sequence[int]) -> int:
        wanted = _leading(self._store.batch_exist(digests))
        if wanted == 0:
            return 0
        offsets = [self._pool.offset(block) for block in blocks[:wanted]]
        sizes = [self._pool.layout.block_bytes] * wanted
        return _leading(self._store.batch_get_into(digests[:wanted], self._region, offsets, sizes))

    def publish(
        self, token_ids: Sequence[int], digests: Sequence[bytes], blocks: Sequence[int], first: int
    ) -> int:
        """Store the sequence's blocks from number ``first`` on, which lie in ``blocks``, and announce what is
        new.

        Returns how many were stored now; blocks that are there already stay as they are.
        """
        if not blocks:
            return 0
        assert first + len(blocks) <= len(digests), "a digest for every block"
        offsets = [self._pool.offset(block) for block in blocks]
        sizes = [self._pool.layout.block_bytes] * len(blocks)
        with self._announcing:
            self._lost_meanwhile.clear()
            clears = self._clears
        try:
            with self._metrics.store_seconds.labels("publish").time():
                stored = self._store.batch_put_from(
                    digests[first : first + len(blocks)], self._region, offsets, sizes, if_exists="keep"
                )
        except (StoreError, TransferError) as error:
            self._failed("publish", error)
            return 0
        self._announce(self._stored_events(token_ids, digests, stored, first), clears)
        self._metrics.blocks_stored.inc(sum(stored))
        return sum(stored)

    def _announce(self, stored: list[BlockStored], clears: int) -> None:
        """Tell what was stored, and take back at once what has been lost again since it was committed."""
        if not stored:
            return
        with self._announcing:
            if self._clears != clears:
                return
            self._publisher.publish(stored)
            gone = [key for event in stored for key in event.block_hashes if key in self._lost_meanwhile]
            if gone:
                self._publisher.publish([BlockRemoved(block_hashes=list(gone), medium=MEDIUM_CPU)])

    def _stored_events(
        self, token_ids: Sequence[int], digests: Sequence[bytes], stored: Sequence[bool], first: int
    ) -> list[BlockStored]:
        """One event for each run of neighbours that are new."""
        size = self._pool.layout.block_tokens
        events = []
        start = first
        for is_new, run in groupby(stored):
            end = start + len(list(run))
            if is_new:
                events.append(
                    BlockStored(
                        block_hashes=list(digests[start:end]),
                        parent_block_hash=digests[start - 1] if start else None,
                        token_ids=list(token_ids[start * size : end * size]),
                        block_size=size,
                        medium=MEDIUM_CPU,
                    )
                )
            start = end
        return events

    def _on_evicted(self, evicted: list[bytes]) -> None:
        blocks = [key for key in evicted if len(key) == keys.DIGEST_BYTES]
        if blocks:
            with self._announcing:
                self._lost_meanwhile.update(blocks)
                self._publisher.publish([BlockRemoved(block_hashes=list(blocks), medium=MEDIUM_CPU)])
            self._metrics.blocks_evicted.inc(len(blocks))

    def _on_cleared(self) -> None:
        with self._announcing:
            self._clears += 1
            self._publisher.publish([AllBlocksCleared()])

    def _failed(self, call: str, error: Exception) -> None:
        self._metrics.store_failures.labels(call).inc()
        logger.warning("the store failed (%s: %s); going on without it", type(error).__name__, error)


def _leading(flags: Sequence[bool]) -> int:
    """How many of the flags are True before the first that is not."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))
