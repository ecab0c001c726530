"""Bad input of clients: each a 4xx with a reason, and the cluster goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from mooncake_transformers.cluster.testing import ServedCluster
from mooncake_transformers.cluster.testing.chat_model import CONTEXT_TOKENS

pytestmark = pytest.mark.slow

MODEL = "tiny-chat"
HELLO = [{"role": "user", "content": "Hello."}]


def post(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"messages": None}, 400, "messages"),
        ({"messages": "Hello."}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "content"),
        ({"messages": [{"role": "wizard", "content": "Hello."}]}, 400, "role"),
        ({"n": 2}, 400, "n"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": -2}, 400, "temperature"),
        ({"model": "no-such-model"}, 404, "no-such-model"),
        ({"messages": [{"role": "user", "content": "far " * CONTEXT_TOKENS}]}, 400, str(CONTEXT_TOKENS)),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_a_bad_chat_request_is_refused_with_its_reason(
    served: ServedCluster, change: dict[str, Any], status: int, reason: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": stream} | change
    found, answer = post(f"{served.url}/v1/chat/completions", json.dumps(body).encode())
    assert found == status, answer
    assert reason in answer["error"]["message"]
    assert answer["error"]["type"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"Hello."', b"\xff\xfe"])
def test_a_body_that_is_no_json_object_is_refused(served: ServedCluster, body: bytes) -> None:
    status, answer = post(f"{served.url}/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["message"]


def test_null_in_an_optional_field_is_as_if_it_were_absent(served: ServedCluster) -> None:
    optional = ("stream", "stream_options", "temperature", "n", "stop", "tools", "seed", "kv_transfer_params")
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4} | dict.fromkeys(optional)
    status, answer = post(f"{served.url}/v1/chat/completions", json.dumps(body).encode())
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4


def test_an_unknown_path_is_not_found(served: ServedCluster) -> None:
    status, _ = post(f"{served.url}/v1/no-such-thing", b"{}")
    assert status == 404


def test_the_cluster_still_answers_after_all_that(served: ServedCluster) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    status, answer = post(f"{served.url}/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 4
