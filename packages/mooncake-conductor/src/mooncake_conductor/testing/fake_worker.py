"""A worker that speaks the whole worker API over real sockets and has no model: its answers follow a
script."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal

import aiohttp.web
import msgspec

from mooncake_conductor.testing.fake_cache import FakeCache
from mooncake_conductor.testing.fake_generation import Behaviour, Generation, tokens_of
from mooncake_store.kv_events.publisher import KVEventPublisher

__all__ = ["Behaviour", "FakeWorker"]

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0

Role = Literal["prefill", "decode", "both"]
Handler = Callable[[aiohttp.web.Request], Awaitable[aiohttp.web.StreamResponse]]


class FakeWorker:
    """Serves while the ``with`` block does, or from ``start`` to ``stop``.

    Its tokeniser takes each byte of the text for a token. A prefill puts the prompt's blocks into a cache
    that publishes KV events; nothing is ever transferred.

    Attributes:
        url: base URL; stays the same over restarts.
        behaviour: what it does with the next requests; may be changed at any time.
        requests: path and JSON body of every generation request so far.
        released: transfer ids it was told to let go of, in order.
        releases_cut: releases whose caller did not wait for the answer.
        abandoned: generation requests whose client went away before the end.
        epoch: changes with every start.
        publisher: sends its KV events; another one after every start.
    """

    def __init__(
        self,
        role: Role = "both",
        *,
        model: str = "fake",
        block_tokens: int = 4,
        max_model_len: int = 256,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.role: Role = role
        self.model = model
        self.block_tokens = block_tokens
        self.max_model_len = max_model_len
        self.behaviour = behaviour or Behaviour()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.released: list[str] = []
        self.releases_cut = 0
        self.abandoned = 0
        self.epoch = 0
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._transports: set[asyncio.BaseTransport] = set()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def engine_id(self) -> str:
        """Name of this incarnation's engine."""
        return f"fake-{self.role}-{self.epoch:x}"

    def start(self) -> FakeWorker:
        """Start serving, with an empty cache and a new epoch, at the port of the time before."""
        assert self._thread is None, "the worker runs already"
        self.epoch = secrets.randbits(63)
        self.publisher = KVEventPublisher()
        self._cache = FakeCache(self.publisher, self.block_tokens)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=self.engine_id, daemon=True)
        self._thread.start()
        if not ready.wait(START_TIMEOUT_S):
            raise TimeoutError(f"the fake worker did not start within {START_TIMEOUT_S:g} s")
        return self

    def stop(self) -> None:
        """End as a killed process does: every connection is reset and the port is closed."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        loop.call_soon_threadsafe(self._stopping.set)
        thread.join(STOP_TIMEOUT_S)
        assert not thread.is_alive(), f"the fake worker did not stop within {STOP_TIMEOUT_S:g} s"
        self.publisher.close()
        self._thread = self._loop = None

    def restart(self) -> None:
        """Stop, and start another incarnation at the same URL."""
        self.stop()
        self.start()

    def evict(self, tokens: list[int]) -> None:
        """Drop every cached block that lies on this prefix, and publish it."""
        self._cache.evict(tokens)

    def __enter__(self) -> FakeWorker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, ready: threading.Event) -> None:
        asyncio.run(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        app = aiohttp.web.Application()
        app.router.add_get("/health", self._guarded(self._health))
        app.router.add_get("/worker", self._guarded(self._describe))
        app.router.add_get("/v1/models", self._guarded(self._models))
        app.router.add_post("/tokenize", self._guarded(self._tokenize))
        app.router.add_post("/v1/completions", self._guarded(self._generate))
        app.router.add_post("/v1/chat/completions", self._guarded(self._generate))
        app.router.add_post("/kv/release", self._guarded(self._release))
        runner = aiohttp.web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = aiohttp.web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True)
            await site.start()
            self._port = runner.addresses[0][1]
            ready.set()
            await self._stopping.wait()
            await site.stop()
            for transport in self._transports:
                assert isinstance(transport, asyncio.WriteTransport)
                transport.abort()
        finally:
            await runner.cleanup()

    def _guarded(self, handler: Handler) -> Handler:
        """Let a frozen worker answer nothing, and remember each connection so that ``stop`` can cut it."""

        async def guarded(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
            if request.transport is not None:
                self._transports.add(request.transport)
            await self.behaviour.wait_until_thawed()
            return await handler(request)

        return guarded

    async def _health(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        return aiohttp.web.json_response({"status": "ok"})

    async def _describe(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        return aiohttp.web.json_response(
            {
                "engine_id": self.engine_id,
                "epoch": self.epoch,
                "role": self.role,
                "model": self.model,
                "block_tokens": self.block_tokens,
                "max_model_len": self.max_model_len,
                "kv_events": self.publisher.endpoint,
                "kv_events_replay": self.publisher.replay_endpoint,
                "running": 0,
                "waiting": 0,
                "pool_free_blocks": 100,
                "pool_blocks": 100,
            }
        )

    async def _models(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        model = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        return aiohttp.web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        tokens = tokens_of(msgspec.json.decode(await request.read()))
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": self.max_model_len}
        return aiohttp.web.json_response(answer)

    async def _generate(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self.requests.append((request.path, body))
        generation = Generation(self.engine_id, self.behaviour, self._cache, request, body)
        try:
            return await generation.answer()
        except (asyncio.CancelledError, ConnectionError):
            self.abandoned += not self._stopping.is_set()
            raise

    async def _release(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        transfer_id = msgspec.json.decode(await request.read())["transfer_id"]
        held = transfer_id in self._transfer_ids() and transfer_id not in self.released
        self.released.append(transfer_id)
        try:
            await asyncio.sleep(self.behaviour.release_s)
        except asyncio.CancelledError:
            self.releases_cut += not self._stopping.is_set()
            raise
        return aiohttp.web.json_response({"released": held}, status=self.behaviour.release_status)

    def _transfer_ids(self) -> set[str]:
        """Of all its prefills: what is held for them goes only by a release, for nobody fetches here."""
        asked = [body.get("kv_transfer_params") or {} for _, body in self.requests]
        return {params["transfer_id"] for params in asked if params.get("do_remote_decode")}
