"""What clients get: the objects of OpenAI's API, with vLLM's ``token_ids`` and our ``mooncake`` object beside
them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_transformers._errors import RequestError
from mooncake_transformers.answer import FinishReason, TokenStep
from mooncake_transformers.generation import Report

__all__ = ["DONE", "Shape", "error_body", "server_sent"]

DONE = b"data: [DONE]\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def server_sent(event: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


class Shape:
    """Makes the objects of one answer, for chat or plain completions.

    With ``token_ids``, choices carry their tokens (``token_ids``) and the first object the prompt's
    (``prompt_token_ids``), and every token gets a chunk, also one that adds no text yet.
    """

    def __init__(self, model: str, *, chat: bool, token_ids: bool) -> None:
        self._chat = chat
        self._token_ids = token_ids
        self._chunk_kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self, text: str, tokens: list[int], finish: FinishReason | None, prompt: Sequence[int], report: Report
    ) -> dict[str, Any]:
        """The answer in one piece."""
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        kind = "chat.completion" if self._chat else "text_completion"
        body = {**self._head, "object": kind, "choices": [self._choice(content, tokens, finish)]}
        return {**body, **self._prompt(prompt), **_costs(report)}

    def opening(self, prompt: Sequence[int]) -> bytes:
        """What a stream begins with before there is a token; maybe nothing."""
        if self._chat:
            content = {"delta": {"role": "assistant", "content": ""}}
            return self._chunk([self._choice(content, [], None)], self._prompt(prompt))
        return self._chunk([], self._prompt(prompt)) if self._token_ids else b""

    def chunk(self, step: TokenStep) -> bytes:
        """A token's piece of a stream; nothing when it has nothing to tell yet."""
        if not step.text and step.finish is None and not self._token_ids:
            return b""
        content: dict[str, Any] = {"delta": {"content": step.text}} if self._chat else {"text": step.text}
        return self._chunk([self._choice(content, [step.token], step.finish)])

    def last(self, report: Report) -> bytes:
        """The chunk behind the last token: no choice, but the usage."""
        return self._chunk([], _costs(report))

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        return server_sent({**self._head, "object": self._chunk_kind, "choices": choices, **(more or {})})

    def _choice(
        self, content: dict[str, Any], tokens: list[int], finish: FinishReason | None
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**choice, "token_ids": tokens} if self._token_ids else choice

    def _prompt(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt)} if self._token_ids else {}


def _costs(report: Report) -> dict[str, Any]:
    usage = {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.cached_tokens},
    }
    mooncake = {
        "kv_bytes": report.kv_bytes,
        "kv_seconds": report.kv_seconds,
        "driver": report.driver,
        "prefill_engine": report.prefill_engine,
        "decode_engine": report.decode_engine,
        "prefill_seconds": report.prefill_seconds,
    }
    return {"usage": usage, "mooncake": mooncake}
