"""The HTTP API of one worker that does everything itself."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from mooncake_store import Store
from mooncake_transfer import TransferEngine
from mooncake_transfer.listening import listen
from mooncake_transformers._errors import PortTaken
from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.model import CausalModel
from mooncake_transformers.testing import TestClient, running_worker
from mooncake_transformers.worker import Worker

MIB = 1 << 20
WAIT_S = 30.0
LONG = "A long prompt that fills several blocks of sixteen tokens. " * 3


def config(folder: Path, **fields: Any) -> WorkerConfig:
    small = {"kv_pool_bytes": 2 * MIB, "lend_bytes": 4 * MIB, "dtype": "float32", "threads": 1}
    return WorkerConfig(**{"model": str(folder), "served_name": "tiny", **small, **fields})


@pytest.fixture(scope="module")
def worker(tiny_folder: Path) -> Iterator[Worker]:
    with running_worker(config(tiny_folder)) as made:
        yield made


@pytest.fixture
def client(worker: Worker) -> TestClient:
    return TestClient(worker.url)


def chat(content: str = "hi", **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "model": "tiny",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        **fields,
    }


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}"
        time.sleep(0.005)


def test_it_describes_itself(client: TestClient, worker: Worker) -> None:
    assert client.get("/health").status == 200
    (model,) = client.get("/v1/models").body["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    about = client.get("/worker").body
    assert about["engine_id"] == worker.engine_id
    assert (about["role"], about["model"], about["block_tokens"], about["max_model_len"]) == (
        "both",
        "tiny",
        16,
        512,
    )
    assert about["kv_events"].startswith("tcp://127.0.0.1:")
    assert about["kv_events_replay"].startswith("tcp://127.0.0.1:")
    assert about["pool_blocks"] == 2 * MIB // 12288


def test_a_chat_gets_the_tokens_of_the_whole_model(client: TestClient, tiny: CausalModel) -> None:
    answer = client.post("/v1/chat/completions", chat(LONG, return_token_ids=True)).body
    prompt = torch.tensor([answer["prompt_token_ids"]])
    whole = tiny.module.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert answer["choices"][0]["token_ids"] == whole[0, prompt.shape[1] :].tolist()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == prompt.shape[1] + 12


def test_the_second_request_takes_its_prefix_from_the_store_and_gets_the_same_answer(
    client: TestClient,
) -> None:
    body = chat("Second time is cheaper. " * 8, return_token_ids=True)
    first, second = (client.post("/v1/chat/completions", body).body for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prompt_tokens = second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens - 1) // 16 * 16
    assert second["choices"] == first["choices"]


def test_the_next_turn_finds_the_blocks_of_the_answer_too(client: TestClient) -> None:
    tokens = [7] * 40
    body = {"model": "tiny", "prompt": tokens, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    answer = client.post("/v1/completions", {**body, "return_token_ids": True}).body["choices"][0][
        "token_ids"
    ]
    turn = client.post(
        "/v1/completions", {**body, "prompt": [*tokens, *answer, 1, 2, 3], "max_tokens": 1}
    ).body
    # 79 tokens were computed: the last one of an answer never is.
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_a_stream_has_the_same_text_as_the_whole_answer_and_ends_with_the_usage(client: TestClient) -> None:
    body = chat("Stream it.", return_token_ids=True)
    whole = client.post("/v1/chat/completions", body).body
    with client.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}) as events:
        chunks = list(events)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    choices = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert (
        "".join(choice["delta"]["content"] for choice in choices) == whole["choices"][0]["message"]["content"]
    )
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 11 + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert set(chunks[-1]["mooncake"]) == {
        "kv_bytes", "kv_seconds", "driver", "prefill_engine", "decode_engine", "prefill_seconds",
    }  # fmt: skip


def test_the_openai_client_works(worker: Worker) -> None:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as user:
        assert [model.id for model in user.models.list()] == ["tiny"]
        messages: Any = [{"role": "user", "content": "hello"}]
        answer = user.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 5
        stream = user.chat.completions.create(
            model="tiny", messages=messages, max_tokens=5, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == answer.choices[0].message.content
        plain = user.completions.create(model="tiny", prompt="hello", max_tokens=3, temperature=0)
        assert plain.choices[0].finish_reason in ("length", "stop")
        with pytest.raises(openai.NotFoundError, match="not served here"):
            user.chat.completions.create(model="other", messages=messages)


def test_tokenize_counts_what_a_request_will_have(client: TestClient) -> None:
    counted = client.post("/tokenize", {"model": "tiny", "messages": chat("count me")["messages"]}).body
    answered = client.post("/v1/chat/completions", chat("count me", max_tokens=1)).body
    assert counted["count"] == len(counted["tokens"]) == answered["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == 512


def test_a_seed_fixes_a_random_answer_and_a_stop_string_ends_one(client: TestClient) -> None:
    random = chat("roll", temperature=1.0, seed=5, max_tokens=16)
    texts = [
        client.post("/v1/chat/completions", random).body["choices"][0]["message"]["content"] for _ in range(2)
    ]
    assert texts[0] == texts[1]
    stop = texts[0][4:6]
    cut = client.post("/v1/chat/completions", {**random, "stop": stop}).body["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == texts[0][: texts[0].index(stop)]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", b"{", 400, "malformed_request", None),
        ("/v1/chat/completions", {"model": "tiny"}, 400, "malformed_request", "messages"),
        ("/v1/chat/completions", chat(max_tokens=0), 400, "malformed_request", "max_tokens"),
        ("/v1/chat/completions", chat(n=3), 400, "unsupported_parameter", "n"),
        ("/v1/chat/completions", chat(model="other"), 404, "model_not_found", "model"),
        ("/v1/chat/completions", chat("x" * 600), 400, "context_length_exceeded", "messages"),
        ("/v1/completions", {"model": "tiny", "prompt": [1] * 512}, 400, "context_length_exceeded", "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "malformed_request", "prompt"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model_not_found", "model"),
        ("/no/such/path", {}, 404, "no_such_endpoint", None),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(
    client: TestClient, path: str, body: object, status: int, code: str, param: str | None
) -> None:
    reply = client.post(path, body)
    assert (reply.status, reply.error_code, reply.body["error"]["param"]) == (status, code, param)
    assert len(reply.body["error"]["message"]) > 10


def test_a_client_that_goes_away_ends_its_answer_and_frees_its_blocks(
    client: TestClient, worker: Worker
) -> None:
    with client.stream("/v1/chat/completions", chat(LONG, max_tokens=300, return_token_ids=True)) as events:
        next(events)
        assert client.get("/worker").body["running"] == 1
    wait_until(lambda: client.get("/worker").body["running"] == 0, "the answer has ended")
    wait_until(lambda: worker.pool.free_count == worker.pool.block_count, "all blocks are free")


def test_a_client_that_goes_away_while_its_request_waits_leaves_nothing_behind(
    client: TestClient, worker: Worker
) -> None:
    taken = worker.pool.try_allocate(worker.pool.free_count)
    assert taken
    body = json.dumps(chat(LONG)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(worker.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: client.get("/worker").body["waiting"] == 1, "the request waits")
    wait_until(lambda: client.get("/worker").body["waiting"] == 0, "the request is gone")
    worker.pool.release(taken)
    wait_until(lambda: worker.pool.free_count == worker.pool.block_count, "all blocks are free")
    assert client.post("/v1/chat/completions", chat(LONG)).status == 200


def test_answers_side_by_side_are_those_of_each_alone(client: TestClient) -> None:
    bodies = [chat(f"number {number} " * (number + 1), return_token_ids=True) for number in range(6)]
    alone = [client.post("/v1/chat/completions", body).body["choices"] for body in bodies]
    together: list[Any] = [None] * len(bodies)

    def ask(number: int) -> None:
        together[number] = client.post("/v1/chat/completions", bodies[number]).body["choices"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert together == alone


def test_metrics_count_requests_tokens_and_blocks(client: TestClient) -> None:
    client.post("/v1/chat/completions", chat("measure " * 10))
    client.post("/v1/chat/completions", chat("measure " * 10))
    text = client.get("/metrics").body
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['mooncake_worker_requests_total{endpoint="chat",status="200"}']) >= 2
    assert float(values["mooncake_worker_cached_tokens_total"]) >= 80
    assert float(values["mooncake_worker_blocks_stored_total"]) >= 5
    assert float(values["mooncake_worker_pool_blocks"]) == 2 * MIB // 12288


def test_a_request_that_no_blocks_become_free_for_is_told_to_come_back(tiny_folder: Path) -> None:
    with running_worker(config(tiny_folder, pool_wait_s=0.05)) as made:
        client = TestClient(made.url)
        taken = made.pool.try_allocate(made.pool.block_count - 2)
        assert taken is not None
        reply = client.post("/v1/chat/completions", chat(LONG))
        assert (reply.status, reply.error_code) == (503, "kv_pool_exhausted")
        assert reply.headers["retry-after"] == "1"
        made.pool.release(taken)
        assert client.post("/v1/chat/completions", chat(LONG)).status == 200


def test_a_pool_smaller_than_the_context_bounds_the_prompt(tiny_folder: Path) -> None:
    with running_worker(config(tiny_folder, kv_pool_bytes=4 * 12288)) as made:
        client = TestClient(made.url)
        assert client.get("/v1/models").body["data"][0]["max_model_len"] == 64
        assert client.post("/v1/completions", {"prompt": [1] * 64}).error_code == "context_length_exceeded"
        assert client.post("/v1/completions", {"prompt": [1] * 60}).body["usage"]["completion_tokens"] <= 4


def test_a_store_that_is_gone_costs_time_but_no_request(tiny_folder: Path) -> None:
    engine = TransferEngine()
    store = Store(engine)
    with running_worker(config(tiny_folder, store=engine.address)) as made:
        client = TestClient(made.url)
        before = client.post("/v1/chat/completions", chat(LONG)).body
        store.close()
        engine.close()
        after = client.post("/v1/chat/completions", chat(LONG)).body
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "mooncake_worker_store_failures_total{" in client.get("/metrics").body


def test_a_taken_port_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}.*--port"):
            Worker(config(tmp_path / "no-model", port=port))
    with listen("::1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"cannot serve at \[::1\]:{port}: .*--port"):
            Worker(config(tmp_path / "no-model", host="::1", port=port))


def test_it_serves_and_publishes_at_ipv6_addresses(tiny_folder: Path) -> None:
    with running_worker(config(tiny_folder, host="::1")) as made:
        about = TestClient(made.url).get("/worker").body
        told = [made.url, *(str(about[name]) for name in ("transfer", "kv_events", "kv_events_replay"))]
        assert [address.removeprefix("http://").removeprefix("tcp://")[:6] for address in told] == [
            "[::1]:"
        ] * 4


def test_answers_under_way_end_with_an_error_event_when_the_worker_stops(tiny_folder: Path) -> None:
    with running_worker(config(tiny_folder)) as made:
        with TestClient(made.url).stream(
            "/v1/chat/completions", chat(max_tokens=400, return_token_ids=True)
        ) as events:
            next(events)
            made.stop()
            last = list(events)[-1]
        assert last["error"]["code"] == "worker_stopping"
