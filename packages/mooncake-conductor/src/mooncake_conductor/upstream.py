"""Talks HTTP to workers. Every call has a deadline and ends in an answer or in a WorkerError that names the
worker."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, TypeVar

import aiohttp
import anyio
import msgspec

from mooncake_conductor._errors import KvTransferFailed, WorkerRefused, WorkerTimeout, WorkerUnreachable
from mooncake_conductor.sse import EventSplitter
from mooncake_conductor.workers import WorkerInfo

__all__ = ["KV_TRANSFER_FAILED", "EventStream", "Tokenized", "WorkerClient", "deadline", "raise_for_error"]

KV_TRANSFER_FAILED = "kv_transfer_failed"
# Below the keep-alive time of uvicorn (5 s): a connection is given up before the worker's end can be, so that
# no request is sent into a connection that is just being closed.
KEEP_ALIVE_S = 3.0

_T = TypeVar("_T")
JsonObject = dict[str, Any]


class Tokenized(msgspec.Struct, frozen=True):
    """A tokenised prompt, as ``POST /tokenize`` answers. Fields not listed are ignored."""

    tokens: list[int]
    max_model_len: int


class WorkerClient:
    """A pool of connections to all workers. Use inside one event loop; ``close`` it there."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            # Connecting has its own limit; the rest of a call is bounded where it is made, each phase by its
            # own.
            timeout=aiohttp.ClientTimeout(
                total=None, connect=None, sock_connect=connect_timeout_s, sock_read=None
            ),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def describe(self, worker: str, timeout_s: float) -> WorkerInfo:
        """``GET /worker``. Raises WorkerUnreachable, WorkerTimeout, WorkerRefused."""
        body = await self._exchange(worker, "GET", "/worker", None, timeout_s)
        return _decoded(worker, body, WorkerInfo)

    async def tokenize(self, worker: str, request: Mapping[str, object], timeout_s: float) -> Tokenized:
        """``POST /tokenize``. Raises WorkerUnreachable, WorkerTimeout, WorkerRefused."""
        body = await self._exchange(worker, "POST", "/tokenize", request, timeout_s)
        return _decoded(worker, body, Tokenized)

    async def call(
        self, worker: str, path: str, request: Mapping[str, object], timeout_s: float
    ) -> JsonObject:
        """POST and read the whole JSON answer. Raises WorkerUnreachable, WorkerTimeout, WorkerRefused,
        KvTransferFailed."""
        body = await self._exchange(worker, "POST", path, request, timeout_s)
        answer: JsonObject = _decoded(worker, body, JsonObject)
        raise_for_error(worker, answer)
        return answer

    @asynccontextmanager
    async def stream(
        self, worker: str, path: str, request: Mapping[str, object], timeout_s: float
    ) -> AsyncIterator[EventStream]:
        """POST and read the answer as events; ``timeout_s`` bounds the wait for its headers.

        Leaving closes the connection unless all was read, which tells the worker to stop. Raises
        WorkerUnreachable, WorkerTimeout, WorkerRefused, KvTransferFailed.
        """
        with deadline(worker, timeout_s, f"an answer at {path}"):
            answer = await self._send(worker, "POST", path, request)
        try:
            if answer.status >= 300:
                with deadline(worker, timeout_s, "the rest of an error"):
                    await _raise_status(worker, answer)
            yield EventStream(worker, answer)
        finally:
            answer.close()

    async def _exchange(
        self, worker: str, method: str, path: str, request: Mapping[str, object] | None, timeout_s: float
    ) -> bytes:
        with deadline(worker, timeout_s, f"an answer at {path}"):
            answer = await self._send(worker, method, path, request)
            try:
                if answer.status >= 300:
                    await _raise_status(worker, answer)
                return await answer.read()
            finally:
                answer.close()

    async def _send(
        self, worker: str, method: str, path: str, request: Mapping[str, object] | None
    ) -> aiohttp.ClientResponse:
        data = None if request is None else msgspec.json.encode(request)
        headers = {} if data is None else {"Content-Type": "application/json"}
        return await self._session.request(
            method, worker + path, data=data, headers=headers, allow_redirects=False
        )


class EventStream:
    """The events of an answer, one after the other."""

    def __init__(self, worker: str, answer: aiohttp.ClientResponse) -> None:
        self.worker = worker
        self._answer = answer
        self._splitter = EventSplitter()
        self._ready: deque[bytes] = deque()

    async def next(self, timeout_s: float) -> bytes | None:
        """The data of the next event; None when the worker has ended its answer.

        Raises WorkerUnreachable when the connection breaks, WorkerTimeout when no event comes in time.
        """
        with deadline(self.worker, timeout_s, "the next token"):
            while not self._ready:
                received = await self._answer.content.readany()
                if not received:
                    return None
                try:
                    self._ready.extend(self._splitter.feed(received))
                except ValueError as error:
                    raise WorkerUnreachable(self.worker, f"sent no usable stream: {error}") from error
        return self._ready.popleft()


@contextmanager
def deadline(worker: str, timeout_s: float, what: str) -> Iterator[None]:
    """Bound what is awaited inside, and turn every way it can fail into a WorkerError."""
    try:
        with anyio.fail_after(timeout_s):
            yield
    except aiohttp.ServerTimeoutError as error:  # also a TimeoutError, so it comes first
        raise WorkerUnreachable(worker, f"cannot be connected to: {error}") from error
    except TimeoutError as error:
        raise WorkerTimeout(worker, f"was silent for {timeout_s:g} s when {what} was due") from error
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        raise WorkerUnreachable(
            worker, f"cannot be connected to: {error.os_error}", refused=refused
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise WorkerUnreachable(worker, f"the connection broke: {type(error).__name__} {error}") from error


async def _raise_status(worker: str, answer: aiohttp.ClientResponse) -> NoReturn:
    body = await answer.read()
    error = _error_object(body) or {
        "message": f"worker answered {answer.status}: {body[:200].decode(errors='replace')}",
        "type": "server_error" if answer.status >= 500 else "invalid_request_error",
        "param": None,
        "code": answer.status,
    }
    _raise_error(worker, answer.status, error, answer.headers.get("Retry-After"))


def raise_for_error(worker: str, answer: Mapping[str, object]) -> None:
    """Raise WorkerRefused or KvTransferFailed if the object is an error, as in the middle of a stream."""
    error = answer.get("error")
    if isinstance(error, dict):
        _raise_error(worker, 502, error, None)


def _raise_error(worker: str, status: int, error: dict[str, object], retry_after: str | None) -> NoReturn:
    if error.get("code") == KV_TRANSFER_FAILED:
        raise KvTransferFailed(worker, str(error.get("message")))
    raise WorkerRefused(worker, status, error, retry_after)


def _error_object(body: bytes) -> dict[str, object] | None:
    try:
        error = msgspec.json.decode(body, type=JsonObject).get("error")
    except msgspec.DecodeError:
        return None
    return error if isinstance(error, dict) else None


def _decoded(worker: str, body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise WorkerUnreachable(worker, f"gave an answer that cannot be read: {error}") from error
