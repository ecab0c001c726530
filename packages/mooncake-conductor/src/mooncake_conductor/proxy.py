"""Takes a request through the cluster: tokenise, place, prefill, decode."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from mooncake_conductor._errors import (
    InvalidRequest,
    KvTransferFailed,
    NoWorker,
    WorkerError,
    WorkerRefused,
    WorkerTimeout,
    WorkerUnreachable,
)
from mooncake_conductor.config import ConductorConfig
from mooncake_conductor.index import ClusterIndex
from mooncake_conductor.metrics import Metrics
from mooncake_conductor.policy.snapshot import Placement, Policy
from mooncake_conductor.relay import TokenStream, with_placement
from mooncake_conductor.release import KvReleases
from mooncake_conductor.requests import GenerationRequest
from mooncake_conductor.upstream import KV_TRANSFER_FAILED, Tokenized, WorkerClient
from mooncake_conductor.workers import Worker, WorkerRegistry

__all__ = ["Proxy", "WholeAnswer"]

# Fields that contradict what a prefill is asked for: one token, not streamed. All others go to it too, so
# that it refuses what the decode worker would refuse, before it computes.
NOT_FOR_PREFILL = frozenset({"max_completion_tokens", "min_tokens", "stream_options"})
Phase = Literal["tokenize", "prefill", "decode"]
JsonObject = dict[str, Any]
_T = TypeVar("_T")

log = logging.getLogger(__name__)


class _PhaseFailed(Exception):
    """A phase failed in a way that another try may mend. Never leaves this module."""

    def __init__(self, phase: Phase, error: WorkerError) -> None:
        super().__init__(str(error))
        self.phase: Phase = phase
        self.error = error


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way through the cluster.

    Attributes:
        prefilling: holds the load of the prefill; closed when that is done.
        held: holds everything else of the attempt, and ``prefilling``.
    """

    request: GenerationRequest
    placement: Placement
    prefill: Worker
    decode: Worker
    prefilling: ExitStack
    held: AsyncExitStack


@dataclass(frozen=True, slots=True)
class _HandOff:
    """A prefill that is done and waits for its decode worker.

    Attributes:
        transfer_id: names what the prefill worker holds.
        params: what the decode worker needs to fetch it.
        answered_s: when the prefill worker answered, which is when the first token was known, by
            ``time.perf_counter``.
    """

    transfer_id: str
    params: JsonObject
    answered_s: float


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is not streamed.

    Attributes:
        body: the JSON object for the client.
        first_token_s: when its first token was known, by ``time.perf_counter``; None if nobody said so.
    """

    body: JsonObject
    first_token_s: float | None


class Proxy:
    """Serves requests with the workers of the registry.

    Each phase is tried at most twice: prefill again, elsewhere if possible, when the connection to its worker
    fails; the whole request again when the decode worker fails before its first token. What then is not
    served raises NoWorker; errors that a worker answered raise WorkerRefused. A prefill worker whose KV cache
    is not going to be fetched is told to let go of it, in the background.

    ``close`` it in the event loop it is used in, before the client.
    """

    def __init__(
        self,
        config: ConductorConfig,
        registry: WorkerRegistry,
        index: ClusterIndex,
        policy: Policy,
        client: WorkerClient,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._registry = registry
        self._index = index
        self._policy = policy
        self._client = client
        self._metrics = metrics
        self._releases = KvReleases(client)

    async def close(self) -> None:
        """End what runs in the background, within about a second. Requests have ended before."""
        await self._releases.close()

    async def answer(self, request: GenerationRequest) -> WholeAnswer:
        """The whole answer. Raises RequestRejected or WorkerRefused."""
        async with AsyncExitStack() as stack:
            return await self._attempts(request, stack, self._decode_whole)

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenStream]:
        """Inside, the first token is there and the rest can be read. Raises RequestRejected or WorkerRefused.

        Leaving stops the decode worker if it is still at it.
        """
        async with AsyncExitStack() as stack:
            yield await self._attempts(request, stack, self._decode_stream)

    async def tokenize(self, model: str, body: Mapping[str, object]) -> Tokenized:
        """Tokenise by the model's least busy worker, or the next. Raises RequestRejected or WorkerRefused."""
        workers = sorted(
            self._registry.of_model(model), key=lambda worker: (worker.requests, worker.last_used)
        )
        failures: list[_PhaseFailed] = []
        for worker in workers[:2]:
            call = self._client.tokenize(worker.url, body, self._config.tokenize_timeout_s)
            try:
                return await self._unless_lost(worker, "tokenize", call)
            except _PhaseFailed as failure:
                failures.append(failure)
        raise self._given_up("tokenize", failures[-1].error) from failures[-1].error

    async def _attempts(
        self,
        request: GenerationRequest,
        stack: AsyncExitStack,
        decode: Callable[[_Attempt, _HandOff | None], Awaitable[_T]],
    ) -> _T:
        token_ids = await self._tokens(request)
        failed: dict[str, str] = {}
        while True:
            async with AsyncExitStack() as held:
                attempt = self._place(request, token_ids, set(failed.values()), held)
                try:
                    result = await self._decoded(attempt, await self._prefill(attempt), decode)
                except _PhaseFailed as failure:
                    if failure.phase in failed or isinstance(failure.error, WorkerTimeout):
                        raise self._given_up(failure.phase, failure.error) from failure.error
                    log.warning("%s is tried again: %s", failure.phase, failure.error)
                    self._metrics.retries.labels(failure.phase).inc()
                    failed[failure.phase] = failure.error.worker
                    continue
                self._metrics.prompt_tokens.inc(len(token_ids))
                self._metrics.matched_tokens.inc(attempt.placement.matched_tokens)
                stack.push_async_callback(held.pop_all().aclose)
                return result

    async def _decoded(
        self,
        attempt: _Attempt,
        hand_off: _HandOff | None,
        decode: Callable[[_Attempt, _HandOff | None], Awaitable[_T]],
    ) -> _T:
        if hand_off is None:
            return await decode(attempt, None)
        with self._releases.unless_handed_over(attempt.prefill.url, hand_off.transfer_id):
            return await decode(attempt, hand_off)

    async def _tokens(self, request: GenerationRequest) -> list[int]:
        """The prompt in tokens, checked for length. Raises RequestRejected or WorkerRefused."""
        if request.token_ids is not None:
            worker, *_ = self._registry.of_model(request.model)
            return _checked_length(request, request.token_ids, worker.described.max_model_len)
        tokenized = await self.tokenize(request.model, request.tokenize_body())
        return _checked_length(request, tokenized.tokens, tokenized.max_model_len)

    def _place(
        self, request: GenerationRequest, token_ids: list[int], avoid: set[str], held: AsyncExitStack
    ) -> _Attempt:
        started_s = time.perf_counter()
        matched = self._index.match(request.model, token_ids)
        snapshot = self._registry.snapshot(request.model, len(token_ids), matched, avoid)
        placement = self._policy.place(snapshot)
        self._metrics.decision.observe(time.perf_counter() - started_s)
        prefill, decode = self._registry.get(placement.prefill), self._registry.get(placement.decode)
        if prefill is None or decode is None:
            raise LookupError(f"policy {self._policy.name} chose {placement}, which is not of its snapshot")
        # Both are loaded from now on: requests placed while this one prefills must see where it will decode.
        prefilling = held.enter_context(ExitStack())
        work = prefilling if decode is not prefill else held
        work.enter_context(self._registry.busy(prefill, max(1, len(token_ids) - placement.matched_tokens)))
        if decode is not prefill:
            held.enter_context(self._registry.busy(decode, len(token_ids) + (request.max_tokens or 0)))
        return _Attempt(request, placement, prefill, decode, prefilling, held)

    async def _prefill(self, attempt: _Attempt) -> _HandOff | None:
        """Prefill, unless one worker does both: then None."""
        if attempt.decode is attempt.prefill:
            return None
        worker = attempt.prefill
        transfer_id = uuid.uuid4().hex
        request = prefill_body(attempt.request.body, transfer_id)
        call = self._client.call(worker.url, attempt.request.path, request, self._config.prefill_timeout_s)
        try:
            answer = await self._unless_lost(worker, "prefill", call)
        except (asyncio.CancelledError, _PhaseFailed):
            # It may be done by now, with its answer on the way.
            self._releases.start(worker.url, transfer_id)
            raise
        answered_s = time.perf_counter()
        attempt.prefilling.close()
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict):
            message = (
                "The prefill worker answered without kv_transfer_params; is it started with role prefill?"
            )
            raise WorkerRefused(
                worker.url, 502, {"message": message, "type": "server_error", "code": "no_kv_transfer"}
            )
        return _HandOff(transfer_id, params, answered_s)

    async def _decode_whole(self, attempt: _Attempt, hand_off: _HandOff | None) -> WholeAnswer:
        request, worker = attempt.request, attempt.decode
        body = decode_body(request.body, hand_off.params if hand_off else None)
        call = self._client.call(worker.url, request.path, body, self._config.answer_timeout_s)
        answer = with_placement(await self._unless_lost(worker, "decode", call), attempt.placement)
        return WholeAnswer(answer, hand_off.answered_s if hand_off else None)

    async def _decode_stream(self, attempt: _Attempt, hand_off: _HandOff | None) -> TokenStream:
        request, worker = attempt.request, attempt.decode
        limit_s = self._config.first_token_timeout_s
        if hand_off is None:
            limit_s += self._config.prefill_timeout_s

        async def until_first_token() -> TokenStream:
            body = decode_body(request.body, hand_off.params if hand_off else None)
            events = await attempt.held.enter_async_context(
                self._client.stream(worker.url, request.path, body, limit_s)
            )
            stream = TokenStream(events, attempt.placement, self._config.idle_timeout_s, self._metrics)
            await stream.open(limit_s)
            return stream

        return await self._unless_lost(worker, "decode", until_first_token())

    async def _unless_lost(self, worker: Worker, phase: Phase, call: Coroutine[Any, Any, _T]) -> _T:
        """Await the call, and give it up when the health probes find the worker gone. Raises _PhaseFailed."""
        task = asyncio.create_task(call)
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            with worker.watched(lost.set_result):
                either: set[asyncio.Future[Any]] = {task, lost}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise WorkerUnreachable(worker.url, f"is lost: {lost.result()}")
            return task.result()
        except (WorkerUnreachable, WorkerTimeout, KvTransferFailed) as error:
            if isinstance(error, WorkerUnreachable):
                self._registry.failed(worker, str(error), time.monotonic(), gone=error.refused)
            raise _PhaseFailed(phase, error) from error
        finally:
            lost.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _given_up(self, phase: Phase, error: WorkerError) -> NoWorker:
        code = KV_TRANSFER_FAILED if isinstance(error, KvTransferFailed) else f"{phase}_failed"
        return NoWorker(
            f"The request could not be served, its {phase} failed: {error}. Try again later.",
            code=code,
            retry_after_s=self._config.retry_after_s,
        )


def prefill_body(body: Mapping[str, Any], transfer_id: str) -> JsonObject:
    """The request that makes a worker compute a prompt's KV cache and hold it for ``transfer_id``."""
    kept = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": params}


def decode_body(body: Mapping[str, Any], params: JsonObject | None) -> JsonObject:
    """The request that makes a worker fetch the KV cache named by ``params`` and go on from there."""
    kept = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return kept if params is None else {**kept, "kv_transfer_params": params}


def _checked_length(request: GenerationRequest, token_ids: list[int], max_model_len: int) -> list[int]:
    if len(token_ids) >= max_model_len:
        raise InvalidRequest(
            f"The prompt has {len(token_ids)} tokens; this model's context of {max_model_len} tokens "
            "leaves no room for an answer. Shorten the prompt.",
            code="context_length_exceeded",
            param="prompt" if request.path == "/v1/completions" else "messages",
        )
    return token_ids
