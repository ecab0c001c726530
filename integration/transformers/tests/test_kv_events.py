"""What a worker tells about its part of the store, on the wire that vLLM's subscribers read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from mooncake_store import keys
from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.testing import TestClient, running_worker
from mooncake_transformers.worker import Worker

MIB = 1 << 20
BLOCK_BYTES = 12288
DEADLINE_S = 30.0
STORED, PARENT, TOKENS, SIZE, MEDIUM = 1, 2, 3, 4, 6


class Listener:
    """A worker's whole event stream, from its first batch on, by its replay socket. Plain ZMQ and msgpack."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def events(self) -> list[list[Any]]:
        self._socket.send_multipart([b"", (0).to_bytes(8, "big")])
        events: list[list[Any]] = []
        while True:
            assert self._socket.poll(int(DEADLINE_S * 1000)), "the replay does not end"
            _, sequence, payload = self._socket.recv_multipart()
            if sequence == b"\xff" * 8:
                return events
            events += msgspec.msgpack.decode(payload)[1]

    def until(self, kind: str) -> list[list[Any]]:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            events = self.events()
            if any(event[0] == kind for event in events):
                return events
            assert time.monotonic() < deadline_s, f"no {kind} in {events}"
            time.sleep(0.01)

    def close(self) -> None:
        self._context.destroy(linger=0)


def config(folder: Path, **fields: Any) -> WorkerConfig:
    made = {
        "model": str(folder),
        "served_name": "tiny",
        "kv_pool_bytes": 2 * MIB,
        "threads": 1,
        "dtype": "float32",
    }
    return WorkerConfig(**{**made, **fields})


@pytest.fixture
def worker(tiny_folder: Path) -> Iterator[Worker]:
    with running_worker(config(tiny_folder, lend_bytes=8 * BLOCK_BYTES)) as made:
        yield made


@pytest.fixture
def listener(worker: Worker) -> Iterator[Listener]:
    made = Listener(TestClient(worker.url).get("/worker").body["kv_events_replay"])
    yield made
    made.close()


def complete(worker: Worker, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer: dict[str, Any] = TestClient(worker.url).post("/v1/completions", body).body
    return answer


def test_the_stream_begins_with_nothing_held(listener: Listener) -> None:
    assert listener.events() == [["AllBlocksCleared"]]


def test_stored_blocks_are_told_with_hashes_parent_tokens_and_medium(
    worker: Worker, listener: Listener
) -> None:
    prompt = list(range(40))
    complete(worker, prompt)
    (event,) = [event for event in listener.until("BlockStored") if event[0] == "BlockStored"]
    digests = keys.block_digests(prompt, 16, worker._prefix_store.root)
    assert event[STORED] == digests
    assert event[PARENT] is None
    assert event[TOKENS] == prompt[:32]
    assert (event[SIZE], event[MEDIUM]) == (16, "CPU")


def test_a_longer_prompt_tells_its_new_blocks_only_and_whose_children_they_are(
    worker: Worker, listener: Listener
) -> None:
    prompt = list(range(40))
    complete(worker, prompt)
    complete(worker, [*prompt[:32], *range(100, 140)])
    # The store's thread tells of the second prompt some time after its answer; a third waits for that.
    complete(worker, [5])
    complete(worker, [*prompt[:32], *range(100, 140), 7])
    stored = [event for event in listener.events() if event[0] == "BlockStored"]
    assert len(stored) == 2
    assert stored[1][PARENT] == stored[0][STORED][-1]
    assert stored[1][TOKENS] == list(range(100, 132))
    assert len(stored[1][STORED]) == 2


def test_evicted_blocks_are_told_and_found_no_more(worker: Worker, listener: Listener) -> None:
    first = [1] * 49
    complete(worker, first)
    for filler in range(2, 6):
        complete(worker, [filler] * 64)
    events = listener.until("BlockRemoved")
    stored = [digest for event in events if event[0] == "BlockStored" for digest in event[STORED]]
    removed = [event for event in events if event[0] == "BlockRemoved"]
    gone = [digest for event in removed for digest in event[1]]
    assert removed[0][2] == "CPU"
    assert set(gone) <= set(stored)
    assert len(stored) - len(gone) <= 8, "no more is held than there is room for"
    assert complete(worker, first)["usage"]["prompt_tokens_details"]["cached_tokens"] < 48
