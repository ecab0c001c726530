"""One request from prompt to last token, in the three ways a worker serves it.

- whole: prefill and decode here (``GenerationService.run``);
- for a decode worker: prefill here, and hold the KV cache for it (``GenerationService.prefill_only``);
- from a prefill worker: fetch the KV cache from there, and decode here (``run`` with ``Generation.remote``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from mooncake_transfer import Region
from mooncake_transformers._errors import HandoffMismatch, KVTransferFailed
from mooncake_transformers.answer import Answer, TokenStep
from mooncake_transformers.blocks import BlockWaiters, release_when_done
from mooncake_transformers.decode_stream import DecodeStream
from mooncake_transformers.handoff import HandoffClient, HandoffTable, Offer, Pulled, prompt_digest
from mooncake_transformers.kv_cache import SequenceCache
from mooncake_transformers.kv_pool import KVPool
from mooncake_transformers.metrics import WorkerMetrics
from mooncake_transformers.model import CausalModel
from mooncake_transformers.prefill import ANSWER_CAPACITY_TOKENS, Prefilled, Prefiller
from mooncake_transformers.prefix_store import PrefixStore
from mooncake_transformers.runner import DecodeJob, ModelRunner
from mooncake_transformers.sampling import Sampling
from mooncake_transformers.text_stream import TextStream

__all__ = ["Generation", "GenerationParts", "GenerationService", "RemotePrefill", "Report"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemotePrefill:
    """Where a prompt was prefilled: address of that worker's engine, and the transfer to ask for."""

    address: str
    transfer_id: str


@dataclass(frozen=True)
class Generation:
    """What is to be generated. ``max_tokens`` fits into the model's context behind the prompt."""

    token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    remote: RemotePrefill | None = None


@dataclass
class Report:
    """What a request cost, filled in while it runs. Times in seconds; engines by their worker's id."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    kv_bytes: int = 0
    kv_seconds: float = 0.0
    driver: str = ""
    prefill_engine: str = ""
    decode_engine: str = ""
    prefill_seconds: float = 0.0


@dataclass(frozen=True)
class GenerationParts:
    """What a GenerationService works with; the worker puts it together.

    Attributes:
        store_thread: executor with a single thread, in which the store is used.
        handoff_threads: executor for calls that wait for other workers.
        store_decoded: whether the blocks of answers are stored.
        max_running: answers decoded at the same time.
    """

    engine_id: str
    model: CausalModel
    runner: ModelRunner
    pool: KVPool
    region: Region
    prefix_store: PrefixStore
    waiters: BlockWaiters
    prefiller: Prefiller
    handoffs: HandoffTable
    client: HandoffClient
    metrics: WorkerMetrics
    store_thread: Executor
    handoff_threads: Executor
    store_decoded: bool
    max_running: int


class GenerationService:
    """Serves generations. Belongs to one event loop."""

    def __init__(self, parts: GenerationParts) -> None:
        self._parts = parts
        self._slots = asyncio.Semaphore(parts.max_running)
        self._waiting_for_slot = 0
        self._active = 0

    @property
    def running(self) -> int:
        """Requests that are computed, decoded or fetched now."""
        return self._active - self._parts.prefiller.waiting

    @property
    def waiting(self) -> int:
        """Requests that wait for a place, for blocks, or for their turn with the model."""
        return self._waiting_for_slot + self._parts.prefiller.waiting

    async def prefill_only(self, generation: Generation, report: Report, transfer_id: str) -> TokenStep:
        """Compute the prompt and hold its KV cache under ``transfer_id``; returns the first token.

        Raises what ``Prefiller.run`` raises, and MalformedRequest when the id is taken.
        """
        self._active += 1
        try:
            return await self._prefill_and_hold(generation, report, transfer_id)
        finally:
            self._active -= 1

    async def _prefill_and_hold(self, generation: Generation, report: Report, transfer_id: str) -> TokenStep:
        parts = self._parts
        answer = self._new_answer(generation)
        prefilled = await parts.prefiller.run(generation.token_ids, answer, keep_tail=True)
        try:
            await asyncio.wrap_future(prefilled.job.saved)
            parts.handoffs.hold(transfer_id, self._offer(generation, prefilled))
        except BaseException:
            release_when_done(parts.pool, prefilled.blocks, prefilled.job.saved)
            raise
        self._note_prefill(report, prefilled.cached_tokens, prefilled.seconds, parts.engine_id)
        report.completion_tokens = 1
        return prefilled.step

    async def run(self, generation: Generation, report: Report) -> AsyncGenerator[TokenStep, None]:
        """Generate the whole answer, token by token. Closing the iterator ends the request and frees what it
        has.

        Raises KVTransferFailed and its kinds, KVPoolExhausted, ModelFailed, WorkerStopping.
        """
        answer = self._new_answer(generation)
        self._waiting_for_slot += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting_for_slot -= 1
        self._active += 1
        report.decode_engine = self._parts.engine_id
        source = self._run_whole if generation.remote is None else self._run_remote
        try:
            async with contextlib.aclosing(source(generation, answer, report)) as steps:
                async for step in steps:
                    report.completion_tokens += 1
                    yield step
        finally:
            self._active -= 1
            self._slots.release()

    def give_up(self, generation: Generation) -> None:
        """Free what a prefill worker holds for a generation that nobody wants any more. Does not wait."""
        if generation.remote is not None:
            self._parts.handoff_threads.submit(_abandon, self._parts.client, generation.remote)

    # ---- the two ways to a whole answer

    async def _run_whole(
        self, generation: Generation, answer: Answer, report: Report
    ) -> AsyncGenerator[TokenStep, None]:
        parts = self._parts
        prefilled = await parts.prefiller.run(generation.token_ids, answer, keep_tail=False)
        # Decoding goes on with the sequence's own cache; the blocks were for the store, which keeps its own
        # hold on them.
        release_when_done(parts.pool, prefilled.blocks, prefilled.job.saved)
        self._note_prefill(report, prefilled.cached_tokens, prefilled.seconds, parts.engine_id)
        yield prefilled.step
        if prefilled.step.finish is None:
            await asyncio.wrap_future(prefilled.job.saved)
            stream = DecodeStream(parts.runner, parts.metrics, prefilled.cache, answer)
            async with contextlib.aclosing(self._decode(stream, generation)) as steps:
                async for step in steps:
                    yield step

    async def _run_remote(
        self, generation: Generation, answer: Answer, report: Report
    ) -> AsyncGenerator[TokenStep, None]:
        parts, remote, prompt_tokens = self._parts, generation.remote, len(generation.token_ids)
        assert remote is not None
        blocks: list[int] = []
        user: Future[Any] | None = None  # who still touches the blocks
        held = True  # as far as we know, by the prefill worker
        try:
            blocks = await parts.waiters.take(parts.pool.layout.blocks_for(prompt_tokens))
            offer = await asyncio.wrap_future(
                parts.handoff_threads.submit(
                    parts.client.open, remote.address, remote.transfer_id, generation.token_ids
                )
            )
            self._note_prefill(report, offer.cached_tokens, offer.prefill_seconds, offer.engine_id)
            first = answer.accept(offer.first_token)
            if first.finish is None:
                user = parts.handoff_threads.submit(
                    parts.client.fetch, remote.address, remote.transfer_id, offer, blocks
                )
            # The token is on its way to the client while the blocks are on theirs to us.
            yield first
            if user is None:
                return
            self._note_fetch(report, await asyncio.wrap_future(user))
            held = False
            cache = self._new_cache(generation)
            stream = DecodeStream(parts.runner, parts.metrics, cache, answer, blocks, prompt_tokens)
            user = stream.job.done
            async with contextlib.aclosing(self._decode(stream, generation)) as steps:
                async for step in steps:
                    yield step
        except KVTransferFailed as error:
            parts.metrics.handoff_failures.labels(type(error).__name__).inc()
            logger.warning("hand-off failed: %s", error)
            held = isinstance(error, HandoffMismatch)
            raise
        finally:
            if held:
                self.give_up(generation)
            if user is None:
                parts.pool.release(blocks)
            else:
                release_when_done(parts.pool, blocks, user)

    async def _decode(self, stream: DecodeStream, generation: Generation) -> AsyncGenerator[TokenStep, None]:
        async with contextlib.aclosing(stream.steps()) as steps:
            async for step in steps:
                yield step
        if self._parts.store_decoded:
            self._store_answer(stream.job, generation)

    # ---- pieces

    def _new_answer(self, generation: Generation) -> Answer:
        model = self._parts.model
        eos_token_ids = frozenset[int]() if generation.ignore_eos else model.eos_token_ids
        text = TextStream(model.tokenizer, generation.stop)
        return Answer(generation.sampling, text, eos_token_ids, generation.max_tokens)

    def _new_cache(self, generation: Generation) -> SequenceCache:
        return self._parts.model.new_cache(
            len(generation.token_ids) + min(generation.max_tokens, ANSWER_CAPACITY_TOKENS)
        )

    def _offer(self, generation: Generation, prefilled: Prefilled) -> Offer:
        return Offer(
            engine_id=self._parts.engine_id,
            region=self._parts.region.descriptor(),
            root=self._parts.prefix_store.root,
            blocks=prefilled.blocks,
            prompt=prompt_digest(generation.token_ids),
            prompt_tokens=len(generation.token_ids),
            cached_tokens=prefilled.cached_tokens,
            first_token=prefilled.step.token,
            prefill_seconds=prefilled.seconds,
        )

    @staticmethod
    def _note_prefill(report: Report, cached_tokens: int, seconds: float, engine_id: str) -> None:
        report.cached_tokens = cached_tokens
        report.prefill_seconds = seconds
        report.prefill_engine = engine_id

    def _note_fetch(self, report: Report, pulled: Pulled) -> None:
        report.kv_bytes, report.kv_seconds, report.driver = pulled.nbytes, pulled.seconds, pulled.driver
        self._parts.metrics.handoff_bytes.labels(pulled.driver).inc(pulled.nbytes)
        self._parts.metrics.handoff_seconds.observe(pulled.seconds)

    def _store_answer(self, job: DecodeJob, generation: Generation) -> None:
        """Store the full blocks that the answer added to the prompt, so that the next turn finds them."""
        pool = self._parts.pool
        first = len(generation.token_ids) // pool.layout.block_tokens
        count = job.cache.length // pool.layout.block_tokens - first
        blocks = pool.try_allocate(count) if count > 0 else None
        if blocks is None:
            return
        # The last token was drawn, not computed: it has no place in the cache.
        token_ids = [*generation.token_ids, *job.answer.tokens][: job.cache.length]
        stored = self._parts.store_thread.submit(self._save_and_publish, job.cache, token_ids, blocks, first)
        release_when_done(pool, blocks, stored)

    def _save_and_publish(
        self, cache: SequenceCache, token_ids: Sequence[int], blocks: Sequence[int], first: int
    ) -> None:
        cache.save(self._parts.pool, blocks, first)
        prefix_store = self._parts.prefix_store
        prefix_store.publish(token_ids, prefix_store.digests(token_ids), blocks, first)


def _abandon(client: HandoffClient, remote: RemotePrefill) -> None:
    """Tell the prefill worker that nobody will fetch this any more; its deadline does the same, later."""
    try:
        client.close(remote.address, remote.transfer_id)
    except KVTransferFailed as error:
        logger.info("transfer %s could not be given up early: %s", remote.transfer_id, error)
