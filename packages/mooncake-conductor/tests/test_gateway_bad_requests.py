"""Requests that are not served: each has a status, a reason, and names the field."""

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        pytest.param(CHAT, b'{"model": "fake", "messages": [', None, "not JSON", id="truncated JSON"),
        pytest.param(CHAT, b"\xff\xfe", None, "not JSON", id="no text"),
        pytest.param(CHAT, b"", None, "not JSON", id="empty body"),
        pytest.param(CHAT, [1, 2], None, "Expected `object`", id="no object"),
        pytest.param(CHAT, {"messages": HELLO}, "model", "missing required field `model`", id="no model"),
        pytest.param(CHAT, {"model": "fake"}, "messages", "required field `messages`", id="no messages"),
        pytest.param(CHAT, {"model": "fake", "messages": []}, "messages", "empty", id="empty messages"),
        pytest.param(
            CHAT, {"model": "fake", "messages": "Hi"}, "messages", "Expected `array`", id="messages text"
        ),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": [{"content": "x"}]},
            "messages[0].role",
            "`role`",
            id="no role",
        ),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": [{"role": "user", "content": 7}]},
            "messages[0].content",
            "got `int`",
            id="content is a number",
        ),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": HELLO, "temperature": "hot"},
            "temperature",
            "got `str`",
            id="temperature is text",
        ),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": HELLO, "temperature": -1},
            "temperature",
            ">= 0",
            id="temperature below zero",
        ),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": HELLO, "max_tokens": 0},
            "max_tokens",
            ">= 1",
            id="no tokens wanted",
        ),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": HELLO, "stream": "yes"},
            "stream",
            "got `str`",
            id="stream is text",
        ),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": [*HELLO, {"role": "user"}]},
            "messages[1].content",
            "has no content",
            id="user without content",
        ),
        pytest.param("/tokenize", {"prompt": "x"}, "model", "`model`", id="tokenise for no model"),
        pytest.param(TEXT, {"model": "fake"}, "prompt", "required field `prompt`", id="no prompt"),
        pytest.param(TEXT, {"model": "fake", "prompt": ""}, "prompt", "empty", id="empty prompt"),
        pytest.param(
            TEXT, {"model": "fake", "prompt": ["a", "b"]}, "prompt", "2 prompts; one can", id="many prompts"
        ),
        pytest.param(
            TEXT, {"model": "fake", "prompt": [[1], [2], [3]]}, "prompt", "3 prompts", id="many token lists"
        ),
        pytest.param(TEXT, {"model": "fake", "prompt": [1, "a"]}, "prompt", "mixes", id="mixed prompt"),
        pytest.param(TEXT, {"model": "fake", "prompt": [[]]}, "prompt", "empty", id="empty token list"),
        pytest.param(TEXT, {"model": "fake", "prompt": [""]}, "prompt", "empty", id="list of empty text"),
        pytest.param(
            CHAT,
            {"model": "fake", "messages": [*HELLO, {"role": "wizard", "content": "x"}]},
            "messages[1].role",
            "the role 'wizard'",
            id="unknown role",
        ),
        pytest.param(CHAT, {"model": "fake", "messages": HELLO, "n": 2}, "n", "n is 2", id="two answers"),
        pytest.param(
            TEXT, {"model": "fake", "prompt": "x", "best_of": 2}, "best_of", "best_of is 2", id="best of two"
        ),
        pytest.param(
            TEXT,
            {"model": "fake", "prompt": "x", "stream": None, "stream_options": {"include_usage": True}},
            "stream_options",
            "for streams only",
            id="stream options without a stream",
        ),
        pytest.param(
            TEXT,
            {"model": "fake", "prompt": "x", "max_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "more than the 2 tokens",
            id="more than at most",
        ),
        pytest.param(TEXT, {"model": "fake", "prompt": [1, -2]}, "prompt[1]", ">= 0", id="negative token id"),
        pytest.param(TEXT, {"model": 7, "prompt": "x"}, "model", "got `int`", id="model is a number"),
        pytest.param("/query", {"model": "fake"}, "token_ids", "`token_ids`", id="query without tokens"),
        pytest.param("/register", {"url": "localhost"}, "url", "not the URL of a worker", id="no URL"),
        pytest.param("/unregister", {}, "url", "`url`", id="unregister nothing"),
    ],
)
def test_a_malformed_request_is_refused_with_the_field_and_the_reason(pair, path, body, param, words) -> None:
    answer = pair.client.post(path, body)
    assert answer.status == 400, answer.raw
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param
    assert words in answer.error["message"]
    assert not pair.prefill.requests


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_every_role_of_the_api_is_known(pair, role: str) -> None:
    messages = [{"role": role, "content": "x"}]
    assert pair.client.post(CHAT, {"model": "fake", "messages": messages}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(pair, stream: bool) -> None:
    answer = pair.client.post(CHAT, {"model": "gpt-9", "messages": HELLO, "stream": stream})
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert "'gpt-9' does not exist; served here are fake." in answer.error["message"]


@pytest.mark.parametrize("prompt", ["x" * 256, [1] * 256, "x" * 5000], ids=["just", "token ids", "far"])
def test_a_prompt_that_fills_the_context_is_refused_before_any_work(pair, prompt) -> None:
    answer = pair.client.post(TEXT, {"model": "fake", "prompt": prompt})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt")
    assert f"{len(prompt)} tokens" in answer.error["message"]
    assert "256 tokens" in answer.error["message"]
    assert not pair.prefill.requests


def test_a_chat_that_fills_the_context_names_its_messages(pair) -> None:
    messages = [{"role": "user", "content": "x" * 256}]
    answer = pair.client.post(CHAT, {"model": "fake", "messages": messages})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "messages")


def test_a_prompt_one_token_shorter_is_served(pair) -> None:
    assert pair.client.post(TEXT, {"model": "fake", "prompt": "x" * 255}).status == 200


def test_a_body_over_the_limit_is_refused(cluster) -> None:
    client = cluster("both", body_limit_bytes=100).client
    answer = client.post(TEXT, {"model": "fake", "prompt": "x" * 100})
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_error_of_a_worker_passes_through(pair, role: str, stream: bool) -> None:
    error = {
        "message": "logprobs is too high",
        "type": "invalid_request_error",
        "param": "logprobs",
        "code": 7,
    }
    getattr(pair, role).behaviour.refuse = (422, error)
    answer = pair.client.post(TEXT, {"model": "fake", "prompt": "Hello", "stream": stream})
    assert (answer.status, answer.error) == (422, error)
    assert bool(pair.decode.requests) == (role == "decode")


def test_a_message_of_tool_calls_needs_no_content(pair) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
    assert pair.client.post(CHAT, {"model": "fake", "messages": [*HELLO, calls]}).status == 200


def test_an_overloaded_worker_passes_through_with_its_retry_after(pair) -> None:
    error = {"message": "no free blocks", "type": "overloaded", "param": None, "code": "pool_full"}
    pair.prefill.behaviour.headers = {"Retry-After": "7"}
    pair.prefill.behaviour.refuse = (503, error)
    answer = pair.client.post(TEXT, {"model": "fake", "prompt": "Hello"})
    assert (answer.status, answer.error, answer.headers["Retry-After"]) == (503, error, "7")


def test_a_defect_of_a_worker_is_a_bad_gateway(pair) -> None:
    error = {"message": "KeyError", "type": "server_error", "param": None, "code": 500}
    pair.decode.behaviour.refuse = (500, error)
    answer = pair.client.post(TEXT, {"model": "fake", "prompt": "Hello"})
    assert (answer.status, answer.error) == (502, error)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", TEXT, 405)])
def test_a_path_or_method_that_does_not_exist_answers_in_the_same_form(pair, method, path, status) -> None:
    answer = pair.client.request(method, path)
    assert answer.status == status
    assert path in answer.error["message"]
