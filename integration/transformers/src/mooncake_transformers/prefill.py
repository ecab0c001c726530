"""Computing a prompt: what the store has is fetched, the rest is computed, and what is new is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from mooncake_transformers.answer import Answer, TokenStep
from mooncake_transformers.blocks import BlockWaiters, release_when_done
from mooncake_transformers.kv_cache import SequenceCache
from mooncake_transformers.kv_pool import KVPool
from mooncake_transformers.metrics import WorkerMetrics
from mooncake_transformers.model import CausalModel
from mooncake_transformers.prefix_store import PrefixStore
from mooncake_transformers.runner import ModelRunner, PrefillJob

__all__ = ["Prefilled", "Prefiller"]

# An answer's first tokens should not make the cache grow; what a long answer needs is added by doubling.
ANSWER_CAPACITY_TOKENS = 128


@dataclass(eq=False)
class Prefilled:
    """A prompt that was computed.

    Attributes:
        step: the first token.
        seconds: what the model took.
        cached_tokens: tokens that came from the store.
        blocks: pool blocks of the prompt, with one user, the caller; written once ``job.saved`` is done.
        job: its cache belongs to the caller once ``job.saved`` is done.
    """

    step: TokenStep
    seconds: float
    cached_tokens: int
    blocks: list[int]
    job: PrefillJob

    @property
    def cache(self) -> SequenceCache:
        """The sequence's cache."""
        return self.job.cache


class Prefiller:
    """Prefills prompts one after another, in the order they got their blocks. Belongs to one event loop.

    A prompt looks into the store only when its turn has come, and what the one before it added is stored by
    then: of several prompts with one prefix that arrive together, the first computes it and the others find
    it.

    Args:
        store_thread: an executor with a single thread, in which the store is used.
    """

    def __init__(
        self,
        model: CausalModel,
        runner: ModelRunner,
        pool: KVPool,
        prefix_store: PrefixStore,
        waiters: BlockWaiters,
        store_thread: Executor,
        metrics: WorkerMetrics,
    ) -> None:
        self._model = model
        self._runner = runner
        self._pool = pool
        self._store = prefix_store
        self._waiters = waiters
        self._store_thread = store_thread
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.waiting = 0

    async def run(self, token_ids: Sequence[int], answer: Answer, *, keep_tail: bool) -> Prefilled:
        """Compute ``token_ids`` and the first token of ``answer``; returns as soon as that token is known.

        With ``keep_tail`` the blocks hold the whole prompt, otherwise its full blocks only. Raises
        KVPoolExhausted, ModelFailed, WorkerStopping. When cancelled, everything is given back.
        """
        layout = self._pool.layout
        full_blocks = len(token_ids) // layout.block_tokens
        self.waiting += 1
        try:
            blocks = await self._waiters.take(layout.blocks_for(len(token_ids)) if keep_tail else full_blocks)
            try:
                await self._turn.acquire()
            except asyncio.CancelledError:
                self._pool.release(blocks)
                raise
        finally:
            self.waiting -= 1
        digests = self._store.digests(token_ids)
        # The last token is always computed: its logits are what the first token is drawn from.
        reusable = min(full_blocks, (len(token_ids) - 1) // layout.block_tokens)
        reused = await self._fetch(digests[:reusable], blocks)
        job = PrefillJob(
            token_ids=token_ids,
            cache=self._model.new_cache(len(token_ids) + min(answer.max_tokens, ANSWER_CAPACITY_TOKENS)),
            answer=answer,
            reused_blocks=blocks[:reused],
            new_blocks=blocks[reused:],
        )
        return await self._compute(job, blocks, digests)

    async def _fetch(self, digests: Sequence[bytes], blocks: list[int]) -> int:
        if not digests:
            return 0
        fetch = self._store_thread.submit(self._store.fetch, digests, blocks)
        try:
            return await asyncio.wrap_future(fetch)
        except BaseException:
            # The store may still write into the blocks; they are free when it has let go of them.
            release_when_done(self._pool, blocks, fetch)
            self._turn.release()
            raise

    async def _compute(self, job: PrefillJob, blocks: list[int], digests: Sequence[bytes]) -> Prefilled:
        reused = len(job.reused_blocks)
        new_full_blocks = blocks[reused : len(digests)]
        # The store's use of the blocks, which ends when they are stored, is separate from the caller's.
        self._pool.retain(new_full_blocks)
        job.saved.add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._after_saved, job, new_full_blocks, digests)
        )
        self._runner.prefill(job)
        try:
            outcome = await asyncio.wrap_future(job.first)
        except BaseException:
            self._runner.cancel(job)
            release_when_done(self._pool, blocks, job.saved)
            raise
        cached_tokens = reused * self._pool.layout.block_tokens
        self._metrics.prompt_tokens.inc(len(job.token_ids))
        self._metrics.cached_tokens.inc(cached_tokens)
        self._metrics.generated_tokens.inc()
        self._metrics.prefill_seconds.observe(outcome.seconds)
        return Prefilled(outcome.step, outcome.seconds, cached_tokens, blocks, job)

    def _after_saved(self, job: PrefillJob, blocks: list[int], digests: Sequence[bytes]) -> None:
        """In the event loop: store what is new, and let the next prompt have its turn behind that."""
        if job.saved.exception() is None and blocks:
            stored = self._store_thread.submit(
                self._store.publish, job.token_ids, digests, blocks, len(job.reused_blocks)
            )
            release_when_done(self._pool, blocks, stored)
        else:
            self._pool.release(blocks)
        self._turn.release()
