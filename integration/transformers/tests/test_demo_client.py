"""The demo's client against a server that answers what the test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mooncake_transformers.demo import ChatClient, RequestFailed, StreamBroken
from mooncake_transformers.demo.client import model_name

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
MOVED = {"kv_bytes": 4096, "kv_seconds": 0.5, "driver": "shm", "prefill_seconds": 0.25}
CHAT = [{"role": "user", "content": "Hello?"}]


class ScriptedServer(ThreadingHTTPServer):
    """Answers every request with ``status`` and ``pieces``; a number among them is a pause in seconds."""

    daemon_threads = True

    def __init__(self, pieces: Sequence[bytes | float], status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedAnswer)
        self.pieces = pieces
        self.status = status
        self.bodies: list[dict[str, object]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class ScriptedAnswer(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        for piece in self.server.pieces:
            if isinstance(piece, bytes):
                self.wfile.write(piece)
                self.wfile.flush()
            else:
                time.sleep(piece)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def event(data: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def token(text: str, token_id: int) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "token_ids": [token_id]}]}


def pieces_of_an_answer() -> Iterator[bytes | float]:
    yield event({"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": [5, 6]})
    yield 0.2
    yield event(token("Good", 7))
    yield 0.1
    yield event(token(" day", 8))
    yield 0.1
    yield event(token("", 9))
    yield event({"choices": [], "usage": USAGE, "mooncake": MOVED})
    yield b"data: [DONE]\n\n"


def test_an_answer_is_collected_with_its_usage_and_what_was_moved() -> None:
    with ScriptedServer(list(pieces_of_an_answer())) as server:
        answer = ChatClient(server.url, "m").ask(CHAT, max_tokens=3)
    assert answer.text == "Good day"
    assert answer.prompt_token_ids == [5, 6]
    assert answer.token_ids == [7, 8, 9]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (40, 32, 3)
    assert (answer.kv_bytes, answer.kv_seconds, answer.driver) == (4096, 0.5, "shm")


def test_the_time_to_first_token_ends_at_the_first_token_not_at_the_role() -> None:
    with ScriptedServer(list(pieces_of_an_answer())) as server:
        answer = ChatClient(server.url, "m").ask(CHAT, max_tokens=3)
    assert answer.ttft_s >= 0.2
    # The last of three tokens left the server two tenths of a second after the first.
    assert answer.ttft_s + 2 * answer.tbt_s >= 0.4


def test_the_request_is_greedy_streamed_and_asks_for_token_ids() -> None:
    with ScriptedServer(list(pieces_of_an_answer())) as server:
        ChatClient(server.url, "m").ask(CHAT, max_tokens=3)
        (body,) = server.bodies
    assert body["temperature"] == 0
    assert body["stream"] is True
    assert body["return_token_ids"] is True
    assert body["max_tokens"] == 3
    assert body["messages"] == CHAT


def test_a_refused_request_tells_status_and_reason() -> None:
    refusal = json.dumps({"error": {"message": "no such model"}}).encode()
    with (
        ScriptedServer([refusal], status=404) as server,
        pytest.raises(RequestFailed, match="answered 404: no such model"),
    ):
        ChatClient(server.url, "m").ask(CHAT, max_tokens=3)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([event(token("Good", 7)), event({"error": {"message": "decode died"}})], "broke off: decode died"),
        ([event(token("Good", 7))], "ended before its end mark"),
        ([event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n"], "without a token"),
        ([event(token("Good", 7)), b"data: [DONE]\n\n"], "without its usage|or without"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_with_a_reason(pieces: list[bytes], reason: str) -> None:
    with ScriptedServer(pieces) as server, pytest.raises(StreamBroken, match=reason):
        ChatClient(server.url, "m").ask(CHAT, max_tokens=3)


def test_the_model_is_named_by_the_gateway() -> None:
    with ScriptedServer([b'{"data": [{"id": "tiny"}]}']) as server:
        assert model_name(server.url) == "tiny"
