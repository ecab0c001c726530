"""A streaming client of the OpenAI chat API that measures time to first token and between tokens."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mooncake_transformers.demo._errors import RequestFailed, StreamBroken
from mooncake_transformers.demo.conversation import Message

__all__ = ["Answer", "ChatClient", "model_name"]

READ_TIMEOUT_S = 120.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed answer and how it came about.

    Attributes:
        text: the whole text.
        prompt_token_ids: the prompt as the worker tokenised it; empty when the server does not say.
        token_ids: the generated tokens.
        prompt_tokens: number of tokens of the prompt.
        cached_tokens: how many of them the prefill worker found in the store or its pool.
        completion_tokens: number of generated tokens.
        ttft_s: from the request's last byte sent to the first token received.
        tbt_s: mean time between two tokens; 0 when there was one only.
        kv_bytes: KV cache moved from the prefill to the decode worker.
        kv_seconds: how long that took.
        driver: the transfer driver that moved it; empty when nothing was moved.
        prefill_seconds: what the prefill worker spent on the prompt.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    tbt_s: float
    kv_bytes: int = 0
    kv_seconds: float = 0.0
    driver: str = ""
    prefill_seconds: float = 0.0


class ChatClient:
    """Talks to one gateway. A connection for each request; thread-safe."""

    def __init__(self, url: str, model: str, *, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        """Make a client.

        Args:
            url: the gateway's, for example ``"http://127.0.0.1:8000"``.
            model: the model's name as ``/v1/models`` gives it.
            read_timeout_s: longest silence within an answer.
        """
        self._address = urlsplit(url).netloc
        self._model = model
        self._read_timeout_s = read_timeout_s

    def ask(self, messages: Sequence[Message], *, max_tokens: int) -> Answer:
        """Send a chat, greedy, and read its answer to the end.

        Raises RequestFailed for a status other than 200, StreamBroken for an error in the stream or its early
        end, OSError when the gateway cannot be reached.
        """
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection(self._address, timeout=self._read_timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", msgspec.json.encode(body), headers)
            sent_s = time.perf_counter()
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(f"the gateway answered {response.status}: {_reason(response.read())}")
            return _collect(response, sent_s)
        except http.client.IncompleteRead as error:
            raise StreamBroken("the connection was lost in the middle of the answer") from error
        finally:
            connection.close()


def model_name(url: str, *, timeout_s: float = 10.0) -> str:
    """The name of the model the gateway serves. Raises RequestFailed, OSError."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RequestFailed(f"the gateway answered {response.status}: {_reason(body)}")
        return str(msgspec.json.decode(body)["data"][0]["id"])
    finally:
        connection.close()


def _collect(response: http.client.HTTPResponse, sent_s: float) -> Answer:
    text: list[str] = []
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    arrivals_s: list[float] = []
    usage: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    for chunk in _events(response):
        if "error" in chunk:
            raise StreamBroken(f"the answer broke off: {chunk['error'].get('message', chunk['error'])}")
        usage = chunk.get("usage") or usage
        moved = chunk.get("mooncake") or moved
        prompt_token_ids = chunk.get("prompt_token_ids") or prompt_token_ids
        for choice in chunk.get("choices", ()):
            new_text = choice.get("delta", {}).get("content") or ""
            new_ids = choice.get("token_ids") or []
            text.append(new_text)
            token_ids += new_ids
            if new_text or new_ids:
                arrivals_s.append(time.perf_counter())
    if not usage or not arrivals_s:
        raise StreamBroken("the answer ended without a token or without its usage")
    gaps = usage["completion_tokens"] - 1
    return Answer(
        text="".join(text),
        prompt_token_ids=prompt_token_ids,
        token_ids=token_ids,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage["completion_tokens"],
        ttft_s=arrivals_s[0] - sent_s,
        tbt_s=(arrivals_s[-1] - arrivals_s[0]) / gaps if gaps > 0 else 0.0,
        kv_bytes=moved.get("kv_bytes", 0),
        kv_seconds=moved.get("kv_seconds", 0.0),
        driver=moved.get("driver") or "",
        prefill_seconds=moved.get("prefill_seconds", 0.0),
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to ``[DONE]``. Raises StreamBroken at an earlier end."""
    while line := response.readline():
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or not data:
            continue
        if data == b"[DONE]":
            return
        yield msgspec.json.decode(data, type=dict[str, Any])
    raise StreamBroken("the answer's stream ended before its end mark: the connection was lost")


def _reason(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
