"""The routes of a conductor."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from mooncake_conductor._errors import (
    BodyTooLarge,
    ConfigError,
    InvalidRequest,
    ModelUnknown,
    RequestRejected,
    WorkerRefused,
)
from mooncake_conductor.conductor import Conductor
from mooncake_conductor.gateway.answers import INTERNAL_ERROR, error_answer, json_answer
from mooncake_conductor.gateway.generation import GenerationResponse
from mooncake_conductor.requests import (
    GenerationRequest,
    PrefixQuery,
    TokenizeRequest,
    WorkerReference,
    parse_chat,
    parse_completion,
    parse_struct,
)
from mooncake_conductor.workers import WorkerInfo

__all__ = ["build_app"]

log = logging.getLogger(__name__)


def build_app(conductor: Conductor) -> Starlette:
    """The ASGI application of a conductor. The caller starts and closes the conductor."""
    gateway = _Gateway(conductor)
    handlers: Mapping[Any, ExceptionHandler] = {
        RequestRejected: gateway.on_rejected,
        WorkerRefused: gateway.on_refused,
        HTTPException: gateway.on_http_error,
        Exception: gateway.on_failure,
    }
    return Starlette(
        routes=[
            Route("/v1/completions", gateway.generation(parse_completion), methods=["POST"]),
            Route("/v1/chat/completions", gateway.generation(parse_chat), methods=["POST"]),
            Route("/v1/models", gateway.models),
            # A path, since ids such as org/name contain slashes.
            Route("/v1/models/{model:path}", gateway.model),
            Route("/tokenize", gateway.tokenize, methods=["POST"]),
            # As an OpenAI client reaches it, whose base URL ends in /v1.
            Route("/v1/tokenize", gateway.tokenize, methods=["POST"]),
            Route("/health", gateway.health),
            Route("/metrics", gateway.metrics),
            Route("/workers", gateway.workers),
            Route("/register", gateway.register, methods=["POST"]),
            Route("/unregister", gateway.unregister, methods=["POST"]),
            Route("/query", gateway.query, methods=["POST"]),
        ],
        exception_handlers=handlers,
    )


class _Gateway:
    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def generation(
        self, parse: Callable[[bytes], GenerationRequest]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint for requests that ``parse`` reads."""

        async def endpoint(request: Request) -> Response:
            checked = parse(await self._body(request))
            return GenerationResponse(self._conductor, checked)

        return endpoint

    async def models(self, request: Request) -> Response:
        """The models that workers have described."""
        models = sorted(self._conductor.registry.models().items())
        return json_answer({"object": "list", "data": [_model_object(name, info) for name, info in models]})

    async def model(self, request: Request) -> Response:
        """One of them, or 404."""
        name = request.path_params["model"]
        info = self._conductor.registry.models().get(name)
        if info is not None:
            return json_answer(_model_object(name, info))
        message = f"The model {name!r} does not exist; GET /v1/models lists those that do."
        # Answered here, not raised: the path would become a label of the request metrics.
        return error_answer(ModelUnknown(message, code="model_not_found", param="model"))

    async def tokenize(self, request: Request) -> Response:
        """A prompt or chat in tokens, by a worker of the model; the body goes to it as it is."""
        raw = await self._body(request)
        model = parse_struct(raw, TokenizeRequest).model
        tokenized = await self._conductor.proxy.tokenize(model, parse_struct(raw, dict[str, Any]))
        count, limit = len(tokenized.tokens), tokenized.max_model_len
        return json_answer({"tokens": tokenized.tokens, "count": count, "max_model_len": limit})

    async def health(self, request: Request) -> Response:
        """200 when at least one model can be served, else 503 with what each worker lacks."""
        registry = self._conductor.registry
        serving = registry.serving()
        workers = {worker.url: worker.reason or worker.state for worker in registry}
        return json_answer(
            {"status": "ok" if serving else "unavailable", "workers": workers}, 200 if serving else 503
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition text."""
        return Response(self._conductor.render_metrics(), media_type=self._conductor.metrics.content_type)

    async def workers(self, request: Request) -> Response:
        """Every worker with its state and load."""
        return json_answer(
            {"workers": [self._conductor.describe(worker) for worker in self._conductor.registry]}
        )

    async def register(self, request: Request) -> Response:
        """Add a worker; the answer shows what its first probe found."""
        url = parse_struct(await self._body(request), WorkerReference).url
        try:
            worker = await self._conductor.register(url)
        except ConfigError as error:
            raise _wrong_url(error) from error
        return json_answer(self._conductor.describe(worker))

    async def unregister(self, request: Request) -> Response:
        """Drain and forget a worker."""
        url = parse_struct(await self._body(request), WorkerReference).url
        try:
            worker = self._conductor.unregister(url)
        except ConfigError as error:
            raise _wrong_url(error) from error
        if worker is None:
            error_object = {"message": f"No worker {url} is registered.", "type": "invalid_request_error"}
            return json_answer({"error": {**error_object, "param": "url", "code": "worker_not_found"}}, 404)
        return json_answer({"url": worker.url, "requests_left": worker.requests})

    async def query(self, request: Request) -> Response:
        """The longest prefix each worker holds of a token sequence."""
        query = parse_struct(await self._body(request), PrefixQuery)
        workers = self._conductor.registry.of_model(query.model)
        matched = self._conductor.index.match(query.model, query.token_ids)
        matches = {
            worker.url: {
                "engine_id": worker.described.engine_id,
                "matched_tokens": matched.get(worker.url, 0),
                "matched_blocks": matched.get(worker.url, 0) // worker.described.block_tokens,
            }
            for worker in workers
        }
        return json_answer(
            {"model": query.model, "longest_matched": max(matched.values(), default=0), "workers": matches}
        )

    async def on_rejected(self, request: Request, error: Exception) -> Response:
        """A request that is not served."""
        assert isinstance(error, RequestRejected)
        self._conductor.metrics.rejected.labels(error.code).inc()
        answer = error_answer(error)
        self._conductor.metrics.requests.labels(request.url.path, str(answer.status_code)).inc()
        return answer

    async def on_refused(self, request: Request, error: Exception) -> Response:
        """A request that a worker refused."""
        assert isinstance(error, WorkerRefused)
        answer = error_answer(error)
        self._conductor.metrics.requests.labels(request.url.path, str(answer.status_code)).inc()
        return answer

    async def on_http_error(self, request: Request, error: Exception) -> Response:
        """A path or method that does not exist."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}."
        error_object = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return json_answer({"error": error_object}, error.status_code, dict(error.headers or {}))

    async def on_failure(self, request: Request, error: Exception) -> Response:
        """A defect: the client is told that there is one; starlette then raises it into the server's log."""
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return json_answer({"error": INTERNAL_ERROR}, 500)

    async def _body(self, request: Request) -> bytes:
        limit = self._conductor.config.body_limit_bytes
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise BodyTooLarge(f"The body is longer than {limit} bytes.", code="body_too_large")
        return bytes(body)


def _model_object(name: str, info: WorkerInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "mooncake",
        "max_model_len": info.max_model_len,
    }


def _wrong_url(error: ConfigError) -> InvalidRequest:
    return InvalidRequest(f"{error}.", code="invalid_url", param="url")
