"""Plain HTTP to a gateway, for tests that look at statuses, headers and single events of a stream."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

__all__ = ["Gateway", "GatewayAnswer", "stream_events"]


class GatewayAnswer(msgspec.Struct, frozen=True):
    """A whole answer: status, decoded JSON body, headers with names in lower case."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


class Gateway:
    """Sends chats and retries nothing. Thread-safe."""

    def __init__(self, url: str, model: str) -> None:
        self._address = urlsplit(url).netloc
        self._model = model

    def open(
        self, text: str, max_tokens: int, *, stream: bool, timeout_s: float = 60
    ) -> http.client.HTTPResponse:
        """Send one greedy chat message; return once the headers are there. The caller closes the response."""
        connection = http.client.HTTPConnection(self._address, timeout=timeout_s)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        # With "close" the response owns the socket, so closing the response closes all.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/chat/completions", msgspec.json.encode(body), headers)
        return connection.getresponse()

    def ask(self, text: str, max_tokens: int = 8) -> GatewayAnswer:
        """Send one greedy chat message and read the whole answer."""
        with self.open(text, max_tokens, stream=False) as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return GatewayAnswer(response.status, msgspec.json.decode(response.read()), headers)

    def works(self, text: str = "Does it work?") -> bool:
        """Whether a request succeeds right now."""
        return self.ask(text).status == 200


def stream_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its end mark. AssertionError when the stream ends without one."""
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:"):
            yield msgspec.json.decode(data, type=dict[str, Any])
    raise AssertionError("the stream ended without its end mark")
