"""Answers a generation request, streamed or whole, and stops the cluster's work on it when the client goes
away."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake_conductor._errors import RequestRejected, WorkerRefused
from mooncake_conductor.gateway.answers import INTERNAL_ERROR, error_answer, json_answer
from mooncake_conductor.metrics import Metrics
from mooncake_conductor.proxy import Proxy
from mooncake_conductor.requests import GenerationRequest

__all__ = ["GenerationResponse"]

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Runs the request while it watches the client's connection."""

    def __init__(self, proxy: Proxy, metrics: Metrics, request: GenerationRequest) -> None:
        super().__init__()
        self._proxy = proxy
        self._metrics = metrics
        self._request = request
        self._received_s = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; returns when the answer is sent or the client is gone."""
        work = asyncio.create_task(self._serve(scope, receive, send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.clients_gone.inc()
                self._count("499")
        finally:
            work.cancel()
            gone.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._request.stream:
                await self._send_stream(send)
                return
            answer = json_answer(await self._proxy.answer(self._request))
        except RequestRejected as error:
            self._metrics.rejected.labels(error.code).inc()
            answer = error_answer(error)
        except WorkerRefused as error:
            answer = error_answer(error)
        except Exception:
            log.exception("a request for %s failed", self._request.path)
            answer = json_answer({"error": INTERNAL_ERROR}, 500)
        self._count(str(answer.status_code))
        await answer(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        async with self._proxy.stream(self._request) as stream:
            self._metrics.ttft.observe(time.perf_counter() - self._received_s)
            self._count("200")
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            async with aclosing(stream.chunks()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _count(self, status: str) -> None:
        self._metrics.requests.labels(self._request.path, status).inc()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
