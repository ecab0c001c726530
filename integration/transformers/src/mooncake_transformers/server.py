"""The worker's HTTP API, shaped like vLLM's server: OpenAI's endpoints, ``/tokenize``, ``/worker``,
``/metrics``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mooncake_transformers._errors import RequestError
from mooncake_transformers.answer import TokenStep
from mooncake_transformers.connection import ClientGone, EventStream, unless_gone
from mooncake_transformers.generation import Generation, GenerationService, Report
from mooncake_transformers.metrics import WorkerMetrics
from mooncake_transformers.planning import Planner
from mooncake_transformers.requests import (
    ChatRequest,
    CompletionRequest,
    ReleaseRequest,
    TokenizeRequest,
    decode_request,
)
from mooncake_transformers.responses import DONE, Shape, error_body, server_sent

__all__ = ["WorkerState", "build_app"]

logger = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_S = "1"


class WorkerState(Protocol):
    """What the API needs to know of its worker."""

    planner: Planner
    metrics: WorkerMetrics

    @property
    def service(self) -> GenerationService:
        """Serves generations."""

    @property
    def healthy(self) -> bool:
        """Whether requests can be served."""

    def describe(self) -> dict[str, object]:
        """The body of ``GET /worker``."""

    def transfer_params(self, transfer_id: str) -> dict[str, object]:
        """What a decode worker needs to fetch the transfer: ``kv_transfer_params`` of a prefill's answer."""

    def release(self, transfer_id: str) -> bool:
        """Free a prompt that is held for a decode worker; whether it was held."""


def build_app(worker: WorkerState) -> Starlette:
    """The ASGI application of one worker."""
    api = _Api(worker)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/worker", api.describe),
            Route("/metrics", api.metrics),
            Route("/v1/models", api.models),
            Route("/tokenize", api.counted("tokenize", api.tokenize), methods=["POST"]),
            Route("/kv/release", api.counted("release", api.release), methods=["POST"]),
            Route("/v1/completions", api.counted("completions", api.complete), methods=["POST"]),
            Route("/v1/chat/completions", api.counted("chat", api.chat), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _unexpected_error},
    )


class _Api:
    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker
        self._planner = worker.planner
        self._started = int(time.time())

    async def health(self, request: Request) -> Response:
        if self._worker.healthy:
            return _json({"status": "ok"})
        return _json({"status": "the model's thread has ended; see the log and restart the worker"}, 503)

    async def describe(self, request: Request) -> Response:
        return _json(self._worker.describe())

    async def metrics(self, request: Request) -> Response:
        return Response(self._worker.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._planner.model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "mooncake",
            "max_model_len": self._planner.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def tokenize(self, request: Request) -> Response:
        body = decode_request(await request.body(), TokenizeRequest)
        self._planner.check_model(body.model)
        tokens = await asyncio.to_thread(self._planner.tokens, body)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._planner.max_model_len})

    async def release(self, request: Request) -> Response:
        body = decode_request(await request.body(), ReleaseRequest)
        return _json({"released": self._worker.release(body.transfer_id)})

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, decode_request(await request.body(), CompletionRequest))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, decode_request(await request.body(), ChatRequest))

    def counted(
        self, endpoint: str, serve: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint with its errors as answers, and its answers counted."""

        async def answer(request: Request) -> Response:
            try:
                response = await serve(request)
            except RequestError as error:
                headers = {"Retry-After": RETRY_AFTER_S} if error.status == 503 else None
                response = _json(error_body(error), error.status, headers)
            except (ClientGone, ClientDisconnect):
                response = Response(status_code=CLIENT_CLOSED_REQUEST)
            self._worker.metrics.requests.labels(endpoint, str(response.status_code)).inc()
            return response

        return answer

    async def _generate(self, request: Request, body: ChatRequest | CompletionRequest) -> Response:
        generation = await asyncio.to_thread(self._planner.plan, body)
        report = Report(prompt_tokens=len(generation.token_ids))
        shape = Shape(
            self._planner.model.name, chat=isinstance(body, ChatRequest), token_ids=body.return_token_ids
        )
        transfer_id = self._planner.transfer_id(body.kv_transfer_params)
        if transfer_id is not None:
            prefill = self._worker.service.prefill_only(generation, report, transfer_id)
            step = await unless_gone(request.receive, prefill)
            answer = shape.whole(step.text, [step.token], step.finish, generation.token_ids, report)
            return _json({**answer, "kv_transfer_params": self._worker.transfer_params(transfer_id)})
        try:
            return await self._answer(request, body, generation, report, shape)
        except ClientGone:
            # It may have left before the generation, which cleans up after itself, had begun.
            self._worker.service.give_up(generation)
            raise

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        generation: Generation,
        report: Report,
        shape: Shape,
    ) -> Response:
        steps = self._worker.service.run(generation, report)
        if not body.stream:
            return _json(await unless_gone(request.receive, _whole(steps, shape, generation, report)))
        # The status line waits for the first token, so that what fails before it is a proper HTTP error.
        try:
            first = await unless_gone(request.receive, _first(steps))
        except BaseException:
            await steps.aclose()
            raise
        usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_events(first, steps, shape, generation, report, usage=usage))


async def _first(steps: AsyncGenerator[TokenStep, None]) -> TokenStep:
    return await anext(steps)


async def _whole(
    steps: AsyncGenerator[TokenStep, None], shape: Shape, generation: Generation, report: Report
) -> dict[str, Any]:
    text: list[str] = []
    tokens: list[int] = []
    finish = None
    async with contextlib.aclosing(steps):
        async for step in steps:
            text.append(step.text)
            tokens.append(step.token)
            finish = step.finish
    return shape.whole("".join(text), tokens, finish, generation.token_ids, report)


async def _events(
    first: TokenStep,
    steps: AsyncGenerator[TokenStep, None],
    shape: Shape,
    generation: Generation,
    report: Report,
    *,
    usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The stream of an answer. What fails now becomes an event, as the status line is out already."""
    async with contextlib.aclosing(steps):
        yield shape.opening(generation.token_ids) + shape.chunk(first)
        try:
            async for step in steps:
                chunk = shape.chunk(step)
                if chunk:
                    yield chunk
        except RequestError as error:
            yield server_sent(error_body(error)) + DONE
            return
    yield (shape.last(report) if usage else b"") + DONE


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": "no_such_endpoint"}
    return _json({"error": body}, error.status_code, dict(error.headers or {}))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = f"an error inside the worker: {type(error).__name__}: {error}; its log has the traceback"
    body = {"message": message, "type": "server_error", "param": None, "code": "internal_error"}
    return _json({"error": body}, 500)
