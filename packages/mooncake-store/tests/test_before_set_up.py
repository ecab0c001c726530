"""Calls before anything is set up, after it was closed, and to owners that leave: errors, and no waits."""

import inspect
import time

import msgspec
import pytest

from mooncake_store import Master, Store, errors
from mooncake_store.policy import PutPolicy

MIB = 1 << 20
# Arguments that would do on a store that stands.
GIVEN = {
    "key": "k",
    "keys": ["k"],
    "data": b"v",
    "nbytes": 1,
    "offset": 0,
    "offsets": [0],
    "start": 0,
    "parts": [(0, 0, 1)],
    "memories": [bytearray(8)],
    "session": "s",
    "pattern": "k",
    "handler": print,
    "policy": PutPolicy(),
    "replicas": 2,
    "segment": 1,
    "source": 1,
    "target": 2,
}


def calls_of(store, region):
    """Every public call of a store, with arguments."""
    for name, method in inspect.getmembers(store, inspect.ismethod):
        if name.startswith("_") or name == "close":
            continue
        wanted = [
            parameter
            for parameter in inspect.signature(method).parameters.values()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        given = [region if one.name == "region" else GIVEN[one.name] for one in wanted]
        yield name, lambda method=method, given=given: method(*given)


def test_every_call_of_a_closed_store_ends_with_an_answer_or_a_typed_error(world, fast):
    engine = world.engine()
    region = engine.allocate(4096)
    store = Store(engine, lend_bytes=MIB, config=fast)
    store.close()
    refused = set()
    for name, call in calls_of(store, region):
        try:
            call()
        except errors.StoreError:
            refused.add(name)
    assert {"put", "get", "exist", "remove", "batch_put_from", "batch_get_into", "ls", "stats"} <= refused


def test_a_store_whose_master_is_not_there_has_no_calls_at_all(world, fast):
    with pytest.raises(errors.MasterUnreachable, match=r"127\.0\.0\.1:1"):
        Store(world.engine(), "127.0.0.1:1", lend_bytes=MIB, config=fast)


def test_an_owner_removes_its_values_and_leaves_without_waiting(world, fast, eventually):
    """Nothing waits for a lease, a reservation or the life of a client."""
    patient = msgspec.structs.replace(fast, lease_ttl_s=60.0, reservation_ttl_s=60.0)
    engine = world.engine()
    master = Master(engine, patient)
    world.stack.callback(master.close)
    owner = world.store(world.engine(), engine.address, lend=MIB, config=patient)
    reader = world.store(world.engine(), engine.address, config=patient)
    owner.put("read", b"1" * 1000)
    owner.put("other", b"2" * 1000)
    reading = reader.open_value("read")
    began_s = time.monotonic()
    owner.remove("read")
    owner.remove("other")
    assert not owner.exist("read")
    reading.close()
    eventually(lambda: owner.stats().free_bytes == MIB)
    owner.close()
    assert master.stats().capacity_bytes == 0
    assert time.monotonic() - began_s < 30.0
