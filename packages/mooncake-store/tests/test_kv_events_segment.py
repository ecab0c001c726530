"""KV events of what the store holds, as a subscriber of vLLM's wire receives them."""

import pytest
import zmq

from mooncake_store import StoreConfig
from mooncake_store.kv_events.publisher import KVEventPublisher
from mooncake_store.kv_events.segment import SegmentEvents
from mooncake_store.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_sequence,
    encode_sequence,
)

MIB = 1 << 20
TIMEOUT_MS = 20_000


class Reader:
    """Follows a publisher from its first event, by asking for replays."""

    def __init__(self, context, publisher):
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.connect(publisher.replay_endpoint)

    def events(self):
        self.socket.send_multipart((b"", encode_sequence(0)))
        found = []
        while True:
            _, sequence, payload = self.socket.recv_multipart()
            if decode_sequence(sequence) < 0:
                return found
            found += decode_batch(payload).events

    def held(self):
        """What the events so far say that there is."""
        keys = set()
        for event in self.events():
            if isinstance(event, BlockStored):
                keys |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert keys >= set(event.block_hashes), "removed without having been stored"
                keys -= set(event.block_hashes)
            else:
                keys.clear()
        return keys


@pytest.fixture
def follow(world):
    """Gives the events of a store's segment."""
    context = zmq.Context()
    world.stack.callback(context.term)

    def followed(store):
        publisher = world.stack.enter_context(KVEventPublisher())
        world.stack.callback(store.close)
        SegmentEvents(store, publisher)
        reader = Reader(context, publisher)
        world.stack.callback(reader.socket.close, 0)
        return reader

    return followed


def test_events_begin_with_nothing_and_follow_what_is_stored_and_removed(world, follow, eventually):
    store = world.store(lend=MIB)
    reader = follow(store)
    assert reader.events() == [AllBlocksCleared()]
    store.put("a", bytes(5000))
    store.put("b", bytes(10))
    eventually(lambda: reader.held() == {b"a", b"b"})
    first = next(event for event in reader.events() if isinstance(event, BlockStored))
    assert (first.block_hashes[0], first.extra_keys[0], first.medium) == (b"a", ["", 5000], "CPU")
    assert (first.token_ids, first.block_size) == ([], 0)
    store.remove("a")
    eventually(lambda: reader.held() == {b"b"})


def test_a_replaced_key_stays_there(world, follow, eventually):
    store = world.store(lend=MIB)
    reader = follow(store)
    for _ in range(5):
        store.put("a", bytes(100), if_exists="replace")
    store.put("end", b"1")
    eventually(lambda: reader.held() == {b"a", b"end"})
    store.remove("a")
    eventually(lambda: reader.held() == {b"end"})


def test_what_is_evicted_is_told_until_the_events_are_what_the_store_has(world, follow, eventually):
    store = world.store(lend=MIB)
    reader = follow(store)
    keys = [f"k{i}" for i in range(40)]
    for key in keys:
        store.put(key, bytes(100_000))
    there = {key.encode() for key, found in zip(keys, store.batch_exist(keys), strict=True) if found}
    assert 0 < len(there) < 40
    eventually(lambda: reader.held() == there)


def test_an_owner_tells_of_values_that_others_put_and_of_their_tenants(world, follow, eventually, fast):
    owner = world.store(lend=MIB)
    reader = follow(owner)
    values = {name: getattr(fast, name) for name in fast.__struct_fields__}
    config = StoreConfig(**{**values, "tenant": "red"})
    world.store(world.engine(), owner.engine.address, config=config).put("a", bytes(100))
    eventually(lambda: reader.held() == {b"a"})
    (stored,) = (event for event in reader.events() if isinstance(event, BlockStored))
    assert stored.extra_keys == [["red", 100]]


def test_a_segment_that_lost_all_it_held_says_so(world, follow, eventually):
    engine = world.engine()
    master = world.store(engine)
    owner = world.store(world.engine(), engine.address, lend=MIB)
    reader = follow(owner)
    owner.put("a", b"1")
    eventually(lambda: reader.held() == {b"a"})
    master.close()
    world.store(engine)
    eventually(lambda: reader.events()[-1] == AllBlocksCleared() and reader.held() == set())
