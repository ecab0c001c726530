"""Answers a generation request, streamed or whole, and stops the cluster's work on it when the client goes
away."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake_conductor._errors import NoWorker, RequestRejected, WorkerRefused
from mooncake_conductor.conductor import Conductor
from mooncake_conductor.gateway.answers import INTERNAL_ERROR, error_answer, json_answer
from mooncake_conductor.requests import GenerationRequest
from mooncake_conductor.sse import DONE, as_event, json_event

__all__ = ["GenerationResponse"]

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Runs the request while it watches the client's connection."""

    def __init__(self, conductor: Conductor, request: GenerationRequest) -> None:
        super().__init__()
        self._proxy = conductor.proxy
        self._metrics = conductor.metrics
        self._ending = conductor.ending
        self._request = request
        self._received_s = time.perf_counter()
        self._streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; returns when the answer is sent, the client is gone, or the conductor ends."""
        work = asyncio.create_task(self._serve(scope, receive, send))
        gone = asyncio.create_task(_client_gone(receive))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({work, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = work.done()
            for task in (work, gone, ending):
                task.cancel()
            failure, *_ = await asyncio.gather(work, gone, ending, return_exceptions=True)
        if isinstance(failure, Exception):
            raise failure
        if not finished and self._ending.is_set():
            await self._break_off(scope, receive, send)
        elif not finished:
            self._metrics.clients_gone.inc()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._request.stream:
                await self._send_stream(send)
                return
            answer = await self._whole()
        except RequestRejected as error:
            answer = self._rejection(error)
        except WorkerRefused as error:
            answer = error_answer(error)
        except Exception:
            # The boundary to the client: it is told that there is a defect, and the log has the reason.
            log.exception("a request for %s failed", self._request.path)
            answer = json_answer({"error": INTERNAL_ERROR}, 500)
        await self._send_whole(answer, scope, receive, send)

    async def _whole(self) -> Response:
        answer = await self._proxy.answer(self._request)
        if answer.first_token_s is not None:
            self._metrics.ttft.observe(answer.first_token_s - self._received_s)
        return json_answer(answer.body)

    async def _send_stream(self, send: Send) -> None:
        async with self._proxy.stream(self._request) as stream:
            self._metrics.ttft.observe(time.perf_counter() - self._received_s)
            self._count(200)
            self._streaming = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            async with aclosing(stream.chunks()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_whole(self, answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
        self._count(answer.status_code)
        await answer(scope, receive, send)

    async def _break_off(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End a request that would outlast the conductor."""
        error = NoWorker(
            "The conductor is shutting down. Send the request again.", code="shutting_down", retry_after_s=1
        )
        if not self._streaming:
            await self._send_whole(self._rejection(error), scope, receive, send)
            return
        self._metrics.broken_streams.labels(error.code).inc()
        last = json_event({"error": error.error_object()}) + as_event(DONE)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _rejection(self, error: RequestRejected) -> Response:
        self._metrics.rejected.labels(error.code).inc()
        return error_answer(error)

    def _count(self, status: int) -> None:
        self._metrics.requests.labels(self._request.path, str(status)).inc()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
