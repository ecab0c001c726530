"""A prompt prefilled by one worker and decoded by another, and everything that can go wrong between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_transfer import TransferEngine
from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.testing import TestClient, running_worker, save_tiny_model
from mooncake_transformers.worker import Worker

MIB = 1 << 20
WAIT_S = 60.0
CHAT = "/v1/chat/completions"
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hand this over, with a tail that fills no block. " * 4}],
    "temperature": 0,
    "max_tokens": 20,
    "ignore_eos": True,
    "return_token_ids": True,
}


def config(folder: Path, role: Any, **fields: Any) -> WorkerConfig:
    small = {"kv_pool_bytes": 2 * MIB, "dtype": "float32", "threads": 1, "lend_bytes": 4 * MIB}
    return WorkerConfig(**{"model": str(folder), "served_name": "tiny", "role": role, **small, **fields})


@pytest.fixture(scope="module")
def prefill(tiny_folder: Path) -> Iterator[Worker]:
    with running_worker(config(tiny_folder, "prefill")) as worker:
        yield worker


@pytest.fixture(scope="module")
def decode(tiny_folder: Path, prefill: Worker) -> Iterator[Worker]:
    with running_worker(config(tiny_folder, "decode", store=prefill.engine.address, lend_bytes=0)) as worker:
        yield worker


def prefilled(worker: Worker | str, transfer_id: str, **fields: object) -> dict[str, Any]:
    """The prefill's answer, as the gateway asks for it."""
    url = worker if isinstance(worker, str) else worker.url
    params = {**WANTED, "transfer_id": transfer_id}
    reply = TestClient(url).post(CHAT, {**BODY, "max_tokens": 1, "kv_transfer_params": params, **fields})
    assert reply.status == 200, reply.body
    body: dict[str, Any] = reply.body
    return body


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}"
        time.sleep(0.005)


def prompt_tokens(worker: Worker) -> float:
    """Prompt tokens it has prefilled so far."""
    lines = TestClient(worker.url).get("/metrics").body.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("mooncake_worker_prompt_tokens_total ")]
    return float(value)


def all_free(worker: Worker) -> None:
    wait_until(lambda: worker.pool.free_count == worker.pool.block_count, "every block is free")


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_both_halves_together_give_the_tokens_of_one_worker_alone(prefill: Worker, decode: Worker) -> None:
    whole = TestClient(prefill.url).post(CHAT, BODY).body
    half = prefilled(prefill, "together")
    params = half["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_engine_id"] == prefill.engine_id
    assert f"{params['remote_host']}:{params['remote_port']}" == prefill.engine.address
    answer = TestClient(decode.url).post(CHAT, {**BODY, "kv_transfer_params": params}).body
    assert answer["choices"] == whole["choices"]
    assert len(set(tokens_of(answer))) > 3
    assert answer["usage"]["prompt_tokens_details"] == half["usage"]["prompt_tokens_details"]
    blocks = -(-answer["usage"]["prompt_tokens"] // 16)
    told = answer["mooncake"]
    assert told["kv_bytes"] == blocks * decode.pool.layout.block_bytes
    assert told["kv_seconds"] > 0
    assert told["driver"] in ("shm", "tcp")
    assert (told["prefill_engine"], told["decode_engine"]) == (prefill.engine_id, decode.engine_id)
    assert told["prefill_seconds"] == half["mooncake"]["prefill_seconds"]
    all_free(prefill)
    all_free(decode)


def test_a_stream_begins_with_the_token_of_the_prefill(prefill: Worker, decode: Worker) -> None:
    half = prefilled(prefill, "stream")
    body = {
        **BODY,
        "kv_transfer_params": half["kv_transfer_params"],
        "stream_options": {"include_usage": True},
    }
    with TestClient(decode.url).stream(CHAT, body) as events:
        chunks = list(events)
    tokens = [token for chunk in chunks[1:-1] for token in chunk["choices"][0]["token_ids"]]
    assert tokens[:1] == tokens_of(half)
    assert tokens == tokens_of(TestClient(prefill.url).post(CHAT, BODY).body)
    assert chunks[-1]["mooncake"]["kv_bytes"] > 0


def test_random_answers_go_on_from_the_first_token_as_one_worker_would(
    prefill: Worker, decode: Worker
) -> None:
    random = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    whole = TestClient(prefill.url).post(CHAT, {**BODY, **random}).body
    half = prefilled(prefill, "random", **random)
    body = {**BODY, **random, "kv_transfer_params": half["kv_transfer_params"]}
    assert TestClient(decode.url).post(CHAT, body).body["choices"] == whole["choices"]


def test_an_answer_of_one_token_moves_no_bytes_and_frees_the_prompt(prefill: Worker, decode: Worker) -> None:
    half = prefilled(prefill, "short")
    body = {**BODY, "max_tokens": 1, "kv_transfer_params": half["kv_transfer_params"]}
    answer = TestClient(decode.url).post(CHAT, body).body
    assert tokens_of(answer) == tokens_of(half)
    assert answer["mooncake"]["kv_bytes"] == 0
    all_free(prefill)


def test_a_transfer_is_fetched_once(prefill: Worker, decode: Worker) -> None:
    params = prefilled(prefill, "once")["kv_transfer_params"]
    client = TestClient(decode.url)
    assert client.post(CHAT, {**BODY, "kv_transfer_params": params}).status == 200
    again = client.post(CHAT, {**BODY, "kv_transfer_params": params})
    assert (again.status, again.error_code) == (503, "kv_transfer_failed")
    assert "fetched already" in again.body["error"]["message"]


def test_a_transfer_id_cannot_be_used_twice_at_the_same_time(prefill: Worker, decode: Worker) -> None:
    params = prefilled(prefill, "twice")["kv_transfer_params"]
    free = prefill.pool.free_count
    wanted = {**WANTED, "transfer_id": "twice"}
    second = TestClient(prefill.url).post(CHAT, {**BODY, "max_tokens": 1, "kv_transfer_params": wanted})
    assert (second.status, second.body["error"]["param"]) == (400, "kv_transfer_params.transfer_id")
    wait_until(lambda: prefill.pool.free_count == free, "the second prompt's blocks are free")
    assert TestClient(decode.url).post(CHAT, {**BODY, "kv_transfer_params": params}).status == 200


def test_another_prompt_than_the_one_prefilled_is_refused(prefill: Worker, decode: Worker) -> None:
    params = prefilled(prefill, "mismatch")["kv_transfer_params"]
    other = {
        **BODY,
        "messages": [{"role": "user", "content": "Something else."}],
        "kv_transfer_params": params,
    }
    reply = TestClient(decode.url).post(CHAT, other)
    assert (reply.status, reply.error_code) == (503, "kv_transfer_failed")
    assert "another prompt" in reply.body["error"]["message"]
    all_free(prefill)
    all_free(decode)


def test_a_decode_worker_with_another_model_is_refused(prefill: Worker, tmp_path: Path) -> None:
    params = prefilled(prefill, "other-model")["kv_transfer_params"]
    other = save_tiny_model(tmp_path, seed=1)
    with running_worker(config(other, "decode", lend_bytes=0)) as stranger:
        reply = TestClient(stranger.url).post(CHAT, {**BODY, "kv_transfer_params": params})
    assert (reply.status, reply.error_code) == (503, "kv_transfer_failed")
    assert "another model" in reply.body["error"]["message"]


def test_what_is_released_is_freed_at_once_and_can_no_longer_be_fetched(
    prefill: Worker, decode: Worker
) -> None:
    all_free(prefill)
    params = prefilled(prefill, "released")["kv_transfer_params"]
    assert prefill.pool.free_count < prefill.pool.block_count
    client = TestClient(prefill.url)
    assert client.post("/kv/release", {"transfer_id": "released"}).body == {"released": True}
    assert prefill.pool.free_count == prefill.pool.block_count
    assert client.post("/kv/release", {"transfer_id": "released"}).body == {"released": False}
    reply = TestClient(decode.url).post(CHAT, {**BODY, "kv_transfer_params": params})
    assert (reply.status, reply.error_code) == (503, "kv_transfer_failed")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", {}, {"transfer_id": None}, {"transfer_id": 7}, {"transfer_id": ""}]
)
def test_a_malformed_release_is_refused(prefill: Worker, body: object) -> None:
    reply = TestClient(prefill.url).post("/kv/release", body)
    assert (reply.status, reply.error_code) == (400, "malformed_request")


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"best_of": 2}, {"logprobs": True}, {"tools": [{"type": "function"}]}, {"stop": ["x"] * 17}],
)
def test_what_cannot_be_served_is_refused_before_anything_is_prefilled(
    prefill: Worker, fields: dict[str, Any]
) -> None:
    before = prompt_tokens(prefill)
    wanted = {**WANTED, "transfer_id": "never"}
    reply = TestClient(prefill.url).post(CHAT, {**BODY, "kv_transfer_params": wanted, **fields})
    (field,) = fields
    assert (reply.status, reply.body["error"]["param"]) == (400, field)
    assert prompt_tokens(prefill) == before


def test_what_nobody_fetches_is_freed_at_its_deadline(tiny_folder: Path, decode: Worker) -> None:
    with running_worker(config(tiny_folder, "prefill", handoff_deadline_s=0.05)) as worker:
        params = prefilled(worker, "late")["kv_transfer_params"]
        all_free(worker)
        reply = TestClient(decode.url).post(CHAT, {**BODY, "kv_transfer_params": params})
        assert (reply.status, reply.error_code) == (503, "kv_transfer_failed")


def test_what_a_dead_engine_has_opened_is_freed_before_its_deadline(prefill: Worker) -> None:
    prefilled(prefill, "orphan")
    with TransferEngine() as engine:
        assert engine.connect(prefill.engine.address).call("kv.open", b"orphan")
        assert prefill.pool.free_count < prefill.pool.block_count
    all_free(prefill)


def test_a_prefill_worker_that_cannot_be_reached_fails_the_request(decode: Worker) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": 1}
    reply = TestClient(decode.url).post(CHAT, {**BODY, "kv_transfer_params": params})
    assert (reply.status, reply.error_code) == (503, "kv_transfer_failed")
    all_free(decode)


def test_an_eviction_between_is_not_noticed_by_a_prompt_that_is_held(
    tiny_folder: Path, decode: Worker
) -> None:
    # The store has room for one prompt only; what is held for a hand-off lies in the pool, not in the store.
    with running_worker(config(tiny_folder, "prefill", lend_bytes=16 * 12288)) as worker:
        params = prefilled(worker, "held")["kv_transfer_params"]
        for number in range(3):
            others = [{"role": "user", "content": f"{number} pushes the first one out " * 8}]
            prefilled(worker, f"other-{number}", messages=others)
        answer = TestClient(decode.url).post(CHAT, {**BODY, "kv_transfer_params": params}).body
        assert tokens_of(answer) == tokens_of(TestClient(worker.url).post(CHAT, BODY).body)


@contextmanager
def worker_process(
    folder: Path, role: str, *more: str
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """``mooncake worker`` as a process of its own, and what it said when it was ready."""
    ready_read, ready_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    command = [
        sys.executable,
        "-m",
        "mooncake_transfer.cli",
        "worker",
        "--role",
        role,
        "--model",
        str(folder),
    ]
    command += ["--served-name", "tiny", "--dtype", "float32", "--threads", "1", "--kv-pool", "2MiB", *more]
    command += ["--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)]
    process = subprocess.Popen(command, pass_fds=(ready_write, lifeline_read))
    os.close(ready_write)
    os.close(lifeline_read)
    try:
        with os.fdopen(ready_read, "rb") as ready:
            yield process, msgspec.json.decode(ready.readline())
    finally:
        os.close(lifeline_write)
        process.wait(WAIT_S)


def test_two_processes_give_the_tokens_of_one_and_die_with_their_parent(
    tiny_folder: Path, prefill: Worker
) -> None:
    whole = TestClient(prefill.url).post(CHAT, BODY).body
    with (
        worker_process(tiny_folder, "prefill", "--lend", "4MiB") as (first, there),
        worker_process(tiny_folder, "decode", "--store", there["address"]) as (second, here),
    ):
        params = prefilled(there["url"], "apart")["kv_transfer_params"]
        answer = TestClient(here["url"]).post(CHAT, {**BODY, "kv_transfer_params": params}).body
        assert answer["choices"] == whole["choices"]
        assert answer["mooncake"]["kv_bytes"] > 0
        # A prefill worker that is killed while it holds a prompt: the decode worker says so, and lives on.
        params = prefilled(there["url"], "lost")["kv_transfer_params"]
        first.send_signal(signal.SIGKILL)
        first.wait(WAIT_S)
        reply = TestClient(here["url"]).post(CHAT, {**BODY, "kv_transfer_params": params})
        assert (reply.status, reply.error_code) == (503, "kv_transfer_failed")
        assert TestClient(here["url"]).get("/health").status == 200
        second.terminate()
        assert second.wait(WAIT_S) == 0
