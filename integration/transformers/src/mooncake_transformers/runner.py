"""The thread that owns the model.

Prompts are computed first come, first served, a chunk at a time; between two chunks every answer under way
gets one token, in turn. So a long prompt delays a running answer by one chunk at most, and no answer waits
for another's end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch

from mooncake_transformers._errors import ModelFailed, UnsupportedModel, WorkerStopping
from mooncake_transformers.answer import Answer, TokenStep
from mooncake_transformers.kv_cache import SequenceCache
from mooncake_transformers.kv_pool import KVPool
from mooncake_transformers.model import CausalModel

__all__ = ["DecodeJob", "ModelRunner", "PrefillJob", "PrefillOutcome"]

logger = logging.getLogger(__name__)
STOP_TIMEOUT_S = 5.0


def _running_future() -> Future[Any]:
    # Marked as running, a future cannot be cancelled by whoever waits for it; the job's flag is the one way
    # to do that.
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """The first token, and the seconds the model took for the prompt."""

    step: TokenStep
    seconds: float


@dataclass(eq=False)
class PrefillJob:
    """A prompt to compute.

    Attributes:
        token_ids: the whole prompt.
        cache: empty; filled when the job is done.
        answer: draws the first token.
        reused_blocks: pool blocks that hold the beginning of the prompt already; at least one token is left
            to compute.
        new_blocks: pool blocks to write the rest to, right behind; may be fewer than the prompt has.
        first: done with the first token.
        saved: done when ``new_blocks`` are written and the cache belongs to the caller.
    """

    token_ids: Sequence[int]
    cache: SequenceCache
    answer: Answer
    reused_blocks: Sequence[int] = ()
    new_blocks: Sequence[int] = ()
    first: Future[PrefillOutcome] = field(default_factory=_running_future)
    saved: Future[None] = field(default_factory=_running_future)
    cancelled: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class DecodeJob:
    """An answer to continue until it is over.

    Attributes:
        cache: holds all tokens but the last one of ``answer``; or it is empty and ``blocks`` hold them.
        answer: has at least one token.
        on_step: called in the model's thread with each further token.
        blocks, block_tokens: pool blocks to load the cache from first, and the tokens in them.
        done: done when the answer is over or was cancelled, and the cache belongs to the caller again.
    """

    cache: SequenceCache
    answer: Answer
    on_step: Callable[[TokenStep], None]
    blocks: Sequence[int] = ()
    block_tokens: int = 0
    done: Future[None] = field(default_factory=_running_future)
    cancelled: bool = False


_Job: TypeAlias = PrefillJob | DecodeJob
_JobT = TypeVar("_JobT", PrefillJob, DecodeJob)


class ModelRunner:
    """Runs jobs on ``model`` in a thread of its own. Its methods may be called from any thread."""

    def __init__(self, model: CausalModel, pool: KVPool, *, chunk_tokens: int, threads: int) -> None:
        self._model = model
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._threads = threads
        self._changed = threading.Condition()
        self._prefills: deque[PrefillJob] = deque()
        self._decodes: deque[DecodeJob] = deque()
        self._stopping = False
        self._warm = _running_future()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the thread and have it warm the model up. Raises UnsupportedModel if it cannot."""
        self._thread.start()
        self._warm.result()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Fail every job with WorkerStopping once the current step is done. Does not wait."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait for the thread's end. Safe to call twice."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("the model still computes %g s after it was told to stop", STOP_TIMEOUT_S)

    def prefill(self, job: PrefillJob) -> None:
        """Queue a prompt. The job's futures tell the rest."""
        self._submit(job, self._prefills)

    def decode(self, job: DecodeJob) -> None:
        """Let an answer take part in the rounds from now on."""
        self._submit(job, self._decodes)

    def cancel(self, job: PrefillJob | DecodeJob) -> None:
        """End a job early: its futures then fail with CancelledError, or are done if it was too late."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def _submit(self, job: _JobT, queue: deque[_JobT]) -> None:
        with self._changed:
            if not self._stopping:
                queue.append(job)
                self._changed.notify()
                return
        _fail(job, _stopping())

    def _drop(self, job: _JobT, queue: deque[_JobT]) -> None:
        with self._changed:
            queue.remove(job)

    # ---- the model's thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._warm_up()
        # What the model raises is for whoever starts the thread.
        except Exception as error:  # noqa: BLE001 - raised again by start()
            self._warm.set_exception(
                UnsupportedModel(f"the model fails on a plain prompt: {type(error).__name__}: {error}")
            )
            return
        self._warm.set_result(None)
        while self._has_work():
            self._advance_prefill()
            with self._changed:
                answers = list(self._decodes)
            for job in answers:
                self._advance_decode(job)
        with self._changed:
            left: list[_Job] = [*self._prefills, *self._decodes]
        for unfinished in left:
            _fail(unfinished, _stopping())

    def _has_work(self) -> bool:
        with self._changed:
            while not self._stopping and not self._prefills and not self._decodes:
                self._changed.wait()
            return not self._stopping

    def _warm_up(self) -> None:
        # The first calls pay for thread pools, kernels and page faults; no request should.
        started_s = time.monotonic()
        length = min(self._chunk_tokens, self._model.context_tokens // 2, 256)
        cache = self._model.new_cache(2 * length)
        for tokens in (length, max(1, length // 4), 1):
            self._model.forward([0] * tokens, cache)
        logger.info("warmed up in %.1f s", time.monotonic() - started_s)

    def _advance_prefill(self) -> None:
        if not self._prefills:
            return
        job = self._prefills[0]
        try:
            if job.cancelled:
                raise CancelledError
            finished = self._prefill_chunk(job)
        # The boundary between one request and all others: whatever the model raised fails this job only.
        except Exception as error:  # noqa: BLE001 - logged with its traceback by _as_failure
            self._drop(job, self._prefills)
            _fail(job, _as_failure(error))
            return
        if finished:
            self._drop(job, self._prefills)

    def _prefill_chunk(self, job: PrefillJob) -> bool:
        started_s = time.monotonic()
        if job.cache.length == 0 and job.reused_blocks:
            tokens = len(job.reused_blocks) * self._pool.layout.block_tokens
            job.cache.load(self._pool, job.reused_blocks, tokens, self._model.device)
        begin = job.cache.length
        chunk = job.token_ids[begin : begin + self._chunk_tokens]
        assert chunk, "at least the last token of a prompt is computed"
        logits = self._model.forward(chunk, job.cache)
        if job.cache.length < len(job.token_ids):
            job.seconds += time.monotonic() - started_s
            return False
        step = job.answer.advance(logits)
        job.seconds += time.monotonic() - started_s
        # First the token, then the copy: whoever waits for the token does not wait for the pool.
        job.first.set_result(PrefillOutcome(step, job.seconds))
        job.cache.save(self._pool, job.new_blocks, len(job.reused_blocks))
        job.saved.set_result(None)
        return True

    def _advance_decode(self, job: DecodeJob) -> None:
        try:
            if job.cancelled:
                raise CancelledError
            if job.blocks and job.cache.length == 0:
                job.cache.load(self._pool, job.blocks, job.block_tokens, self._model.device)
            step = job.answer.advance(self._model.forward(job.answer.tokens[-1:], job.cache))
            job.on_step(step)
        # As above: one request's failure is no other's.
        except Exception as error:  # noqa: BLE001 - logged with its traceback by _as_failure
            self._drop(job, self._decodes)
            _fail(job, _as_failure(error))
            return
        if step.finish is not None:
            self._drop(job, self._decodes)
            job.done.set_result(None)


def _as_failure(error: Exception) -> BaseException:
    if isinstance(error, CancelledError):
        return error
    logger.error("the model failed", exc_info=error)
    return ModelFailed(f"the model failed on this request: {type(error).__name__}: {error}")


def _stopping() -> WorkerStopping:
    return WorkerStopping("the worker is shutting down; send the request to another one")


def _fail(job: _Job, error: BaseException) -> None:
    futures = (job.first, job.saved) if isinstance(job, PrefillJob) else (job.done,)
    for future in futures:
        if not future.done():
            future.set_exception(error)
