"""Replicas and draining over HTTP."""

import httpx
import pytest

from mooncake_store import PutPolicy
from mooncake_store.http.server import HttpServer

MIB = 1 << 20


@pytest.fixture
def owners(world):
    first = world.store(lend=4 * MIB)
    return first, world.store(world.engine(), first.engine.address, lend=4 * MIB)


@pytest.fixture
def http(world, owners):
    server = world.stack.enter_context(HttpServer(owners[0]))
    return world.stack.enter_context(httpx.Client(base_url=server.url, timeout=30))


def test_values_are_copied_moved_and_replicated(http, owners):
    first, second = (f"{owner.segment_id:x}" for owner in owners)
    for key in ("a", "b", "c"):
        owners[0].put(key, key.encode() * MIB, policy=PutPolicy(preferred_segments=(owners[0].segment_id,)))
    assert http.post("/v1/copy", json={"key": "a", "target": second}).status_code == 204
    assert http.post("/v1/move", json={"key": "62", "encoding": "hex", "source": first, "target": second})
    answer = http.post("/v1/replicate", json={"keys": ["c", "unknown"], "replicas": 2})
    assert answer.json() == {"outcomes": ["stored", "gone"]}
    found = http.post("/v1/replicas", json={"keys": ["a", "b", "c", "unknown"]}).json()["replicas"]
    assert [one and set(one) for one in found] == [{first, second}, {second}, {first, second}, None]
    refused = http.post("/v1/copy", json={"key": "a", "target": "1"})
    assert refused.status_code == 409
    assert refused.json()["type"].endswith("copy-failed")
    assert http.post("/v1/copy", json={"key": "unknown", "target": second}).status_code == 404
    assert http.post("/v1/copy", json={"key": "a", "target": "no id"}).status_code == 400


def test_a_segment_is_drained_and_takes_values_again(http, owners):
    first = f"{owners[0].segment_id:x}"
    owners[0].put("k", b"k" * MIB, policy=PutPolicy(preferred_segments=(owners[0].segment_id,)))
    shown = http.post("/v1/drain", json={"segment": first, "timeout_s": 20}).json()
    assert (shown["done"], shown["moved"], shown["left_bytes"]) == (True, 1, 0)
    segments = http.get("/v1/segments").json()["segments"]
    assert sorted(one["draining"] for one in segments) == [False, True]
    shown = http.post("/v1/drain", json={"segment": first, "on": False}).json()
    assert (shown["on"], shown["segment"]) == (False, first)
    assert owners[1].get("k") == b"k" * MIB
    gone = http.post("/v1/drain", json={"segment": "1"}).json()
    assert (gone["stuck"], gone["reasons"]) == (True, {"GONE": 1})
