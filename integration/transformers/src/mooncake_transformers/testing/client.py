"""A plain HTTP client for tests: one connection a request, JSON in and out."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

__all__ = ["Reply", "TestClient"]

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """An answer: status, headers with lower-case names, and the JSON body (or the text, where it is none)."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error_code(self) -> str:
        """``error.code`` of an OpenAI error."""
        return str(self.body["error"]["code"])


class TestClient:
    """Talks to one server."""

    __test__ = False  # no test, whatever its name

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc

    def get(self, path: str) -> Reply:
        """GET."""
        with self._request("GET", path, None) as response:
            return _reply(response)

    def post(self, path: str, body: object) -> Reply:
        """POST ``body`` as JSON, or as it is if it is bytes."""
        with self._request("POST", path, body) as response:
            return _reply(response)

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """POST with ``stream``, and read the events up to ``[DONE]``. Leaving early drops the connection."""
        with self._request("POST", path, {**body, "stream": True}) as response:
            assert response.status == 200, response.read()
            yield _events(response)

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            raw = body if isinstance(body, bytes) else None if body is None else msgspec.json.encode(body)
            connection.request(method, path, raw, {"Content-Type": "application/json"})
            response = connection.getresponse()
            try:
                yield response
            finally:
                response.close()
        finally:
            connection.close()


def _reply(response: http.client.HTTPResponse) -> Reply:
    raw = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    is_json = headers.get("content-type", "").startswith("application/json")
    return Reply(response.status, headers, msgspec.json.decode(raw) if is_json else raw.decode())


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield msgspec.json.decode(data)
    raise AssertionError("the stream ended without [DONE]")
