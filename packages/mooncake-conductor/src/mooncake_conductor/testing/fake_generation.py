"""How a fake worker answers one generation request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp.web
import msgspec

from mooncake_conductor.testing.fake_cache import FakeCache

__all__ = ["Behaviour", "Generation", "tokens_of"]

# No wait of a fake worker goes on for ever, whatever its script says.
LONGEST_WAIT_S = 60.0


@dataclass
class Behaviour:
    """What a fake worker does. Fields may be changed while it runs.

    Attributes:
        answer: the tokens of every answer, as text.
        prefill_s: how long a prefill takes.
        fetch_s: how long the first token takes longer than the others.
        token_s: pause before each token.
        die_after_tokens: reset the connection after so many tokens; 0 resets it before anything is sent.
        stall_after_tokens: send nothing more after so many tokens.
        refuse: answer generation requests with this status and error object.
        kv_transfer_failures: so many of the next decode requests fail to fetch their KV cache.
        fail_in_stream: such a failure comes as the first event of the stream instead of as HTTP status 503.
        release_status: answer releases of KV blocks with this status; 404 is an engine without them.
        release_s: how long a release takes.
        frozen: answer nothing at all, probes included.
        headers: sent along with ``refuse``.
    """

    answer: tuple[str, ...] = ("Hello", ",", " world", "!")
    prefill_s: float = 0.0
    fetch_s: float = 0.0
    token_s: float = 0.0
    die_after_tokens: int | None = None
    stall_after_tokens: int | None = None
    refuse: tuple[int, dict[str, Any]] | None = None
    kv_transfer_failures: int = 0
    fail_in_stream: bool = False
    release_status: int = 200
    release_s: float = 0.0
    frozen: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    async def wait_until_thawed(self) -> None:
        """Return when the worker is not frozen (any more)."""
        until_s = time.monotonic() + LONGEST_WAIT_S
        # Looked at now and then: the test sets it from another thread, which cannot set an asyncio.Event.
        while self.frozen and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def tokens_of(body: Mapping[str, Any]) -> list[int]:
    """The tokens of a request: its token ids, or the bytes of its text or messages."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if prompt is None:
        prompt = "".join(f"<{message['role']}>{message.get('content') or ''}" for message in body["messages"])
    return list(prompt.encode())


class Generation:
    """One request of a fake worker."""

    def __init__(
        self,
        engine_id: str,
        behaviour: Behaviour,
        cache: FakeCache,
        request: aiohttp.web.Request,
        body: dict[str, Any],
    ) -> None:
        self._engine_id = engine_id
        self._behaviour = behaviour
        self._cache = cache
        self._request = request
        self._body = body
        self._chat = request.path.startswith("/v1/chat")
        self._params: dict[str, Any] = body.get("kv_transfer_params") or {}
        self._tokens = tokens_of(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(behaviour.answer)
        self._answer = behaviour.answer[:limit]
        self._cached_tokens = int(self._params.get("cached_tokens", 0))

    async def answer(self) -> aiohttp.web.StreamResponse:
        """Answer as the script says."""
        if self._behaviour.refuse is not None:
            status, error = self._behaviour.refuse
            return aiohttp.web.json_response({"error": error}, status=status, headers=self._behaviour.headers)
        if self._params.get("do_remote_prefill"):
            failed = self._take_kv_transfer_failure()
            if failed is not None:
                return await self._failed(failed)
        else:
            await asyncio.sleep(self._behaviour.prefill_s)
            self._cached_tokens = self._cache.store(self._tokens)
        if self._behaviour.die_after_tokens == 0:
            self._die()
        if self._body.get("stream"):
            return await self._stream()
        for count in range(len(self._answer)):
            await self._before_token(count)
        return aiohttp.web.json_response(self._whole())

    def _take_kv_transfer_failure(self) -> dict[str, Any] | None:
        if self._behaviour.kv_transfer_failures == 0:
            return None
        self._behaviour.kv_transfer_failures -= 1
        message = f"the KV cache of {self._params.get('transfer_id')} cannot be fetched"
        return {"message": message, "type": "server_error", "param": None, "code": "kv_transfer_failed"}

    async def _failed(self, error: dict[str, Any]) -> aiohttp.web.StreamResponse:
        if not (self._body.get("stream") and self._behaviour.fail_in_stream):
            return aiohttp.web.json_response({"error": error}, status=503)
        response = await self._open_stream()
        await self._send(response, {"error": error})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream(self) -> aiohttp.web.StreamResponse:
        response = await self._open_stream()
        if self._chat:
            await self._send(response, self._chunk({"role": "assistant", "content": ""}))
        for count, text in enumerate(self._answer):
            await self._before_token(count)
            await self._send(response, self._chunk({"content": text}))
        await self._before_token(len(self._answer))
        last = self._chunk({}, finish_reason="stop")
        if (self._body.get("stream_options") or {}).get("include_usage"):
            await self._send(response, last)
            last = {**self._chunk({}), "choices": [], "usage": self._usage()}
        await self._send(response, {**last, "mooncake": self._mooncake()})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _open_stream(self) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(self._request)
        return response

    async def _send(self, response: aiohttp.web.StreamResponse, value: object) -> None:
        await response.write(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def _before_token(self, count: int) -> None:
        if count and count == self._behaviour.die_after_tokens:
            self._die()
        if count == self._behaviour.stall_after_tokens:
            await asyncio.sleep(LONGEST_WAIT_S)
        await asyncio.sleep(self._behaviour.token_s + (0 if count else self._behaviour.fetch_s))
        await self._behaviour.wait_until_thawed()

    def _die(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ConnectionResetError("scripted end of the connection")

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._frame(kind), "choices": [choice]}

    def _whole(self) -> dict[str, Any]:
        text = "".join(self._answer)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        whole = {**self._frame("chat.completion" if self._chat else "text_completion"), "choices": [choice]}
        if self._params.get("do_remote_decode"):
            whole["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": self._params["transfer_id"],
                "remote_engine_id": self._engine_id,
                "remote_host": "127.0.0.1",
                "remote_port": 1,
                "cached_tokens": self._cached_tokens,
            }
        return {**whole, "usage": self._usage(), "mooncake": self._mooncake()}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": "fake-1", "object": kind, "created": 1, "model": self._body.get("model")}

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self._tokens), len(self._answer)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _mooncake(self) -> dict[str, Any]:
        return {
            "kv_bytes": 64 * len(self._tokens) if self._params else 0,
            "kv_seconds": 0.001,
            "driver": "fake",
            "prefill_engine": self._params.get("remote_engine_id", self._engine_id),
            "decode_engine": self._engine_id,
            "prefill_seconds": self._behaviour.prefill_s,
        }
