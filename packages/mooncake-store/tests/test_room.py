"""A full store: what leaves, what stays, and when a put is refused."""

import threading
import time

import msgspec
import numpy as np
import pytest

from mooncake_store import errors

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def store(world, fast):
    engine = world.engine()
    made = world.store(engine, lend=MIB, config=msgspec.structs.replace(fast, put_wait_s=0.05))
    return made


def test_puts_never_fail_while_something_can_be_evicted(store, content):
    for number in range(100):
        key = b"k%d" % number
        store.put(key, content(key, 1, 100 * KIB))
        assert store.get(key) == content(key, 1, 100 * KIB)
    stats = store.stats()
    assert stats.stored == 100
    assert stats.evicted == 100 - stats.objects
    assert stats.objects == 10


def test_values_of_changing_sizes_still_find_room(store, content):
    rng = np.random.default_rng(5)
    for number in range(300):
        key, nbytes = b"k%d" % number, int(rng.integers(1, 600 * KIB))
        store.put(key, content(key, 1, nbytes))
        assert store.get(key) == content(key, 1, nbytes)
    assert store.stats().stored == 300


def test_what_is_used_again_outlives_what_is_not(store):
    for number in range(10):
        store.put(f"old-{number}", bytes(100 * KIB))
    for _ in range(3):
        store.get("old-0")
    for number in range(15):
        store.put(f"new-{number}", bytes(100 * KIB))
    assert store.exist("old-0")
    assert not any(store.batch_exist([f"old-{number}" for number in range(1, 10)]))


def test_a_prefix_leaves_from_its_tail(store, world):
    region = world.region(store.engine, bytes(MIB))
    chain = [f"block-{number}" for number in range(8)]
    assert all(store.batch_put_from(chain, region, np.arange(8) * 128 * KIB, 128 * KIB))
    for number in range(3):
        store.put(f"other-{number}", bytes(128 * KIB))
    assert store.batch_exist(chain) == [True] * 5 + [False] * 3


def test_of_a_batch_larger_than_the_store_the_head_is_kept(world, fast):
    engine = world.engine()
    store = world.store(engine, lend=MIB, config=msgspec.structs.replace(fast, put_wait_s=30.0))
    region = world.region(engine, bytes(128 * KIB))
    chain = [f"block-{number}" for number in range(12)]
    started_s = time.monotonic()
    assert store.batch_put_from(chain, region, np.zeros(12, np.int64), 128 * KIB) == [True] * 8 + [False] * 4
    # What the batch itself holds is not waited for.
    assert time.monotonic() - started_s < 15.0
    assert store.batch_exist(chain) == [True] * 8 + [False] * 4
    # Nor do blocks that are there make room for those behind them.
    assert store.batch_put_from(chain, region, np.zeros(12, np.int64), 128 * KIB) == [False] * 12
    assert store.batch_exist(chain) == [True] * 8 + [False] * 4


def test_a_value_larger_than_the_store_is_refused_and_nothing_is_evicted_for_it(store):
    store.put("small", b"1")
    with pytest.raises(
        errors.StoreFull, match=r"1048577 bytes wanted.*larger than the whole store"
    ) as caught:
        store.put("large", bytes(MIB + 1))
    assert store.get("small") == b"1"
    assert caught.value.wanted_bytes == MIB + 1
    assert caught.value.capacity_bytes == MIB
    assert caught.value.evictable_bytes == 4096
    assert caught.value.free_bytes == MIB - 4096


def test_a_store_to_which_nobody_lends_says_so(world):
    store = world.store(world.engine())
    with pytest.raises(errors.StoreFull, match="nobody lends memory"):
        store.put("k", b"1")
    store.put("empty", b"")
    assert store.get("empty") == b""


def test_what_is_being_read_is_not_evicted_and_the_refusal_names_it(store, content):
    value = content(b"k", 1, 800 * KIB)
    store.put("k", value)
    with store._read(["k"]):
        store.put("fits", bytes(100 * KIB))
        with pytest.raises(errors.StoreFull, match=f"{800 * KIB} being read") as caught:
            store.put("does not", bytes(300 * KIB))
        assert caught.value.leased_bytes == 800 * KIB
        assert store.get("k") == value
    store.put("does now", bytes(300 * KIB))
    assert not store.exist("k")


def test_a_put_waits_for_the_end_of_a_read_that_is_in_its_way(world, fast):
    store = world.store(world.engine(), lend=MIB, config=msgspec.structs.replace(fast, put_wait_s=20.0))
    store.put("k", bytes(800 * KIB))
    reading = store._read(["k"])
    reading.__enter__()
    done = threading.Thread(target=store.put, args=("later", bytes(800 * KIB)))
    done.start()
    done.join(0.2)
    assert done.is_alive()
    reading.__exit__(None, None, None)
    done.join(10)
    assert not done.is_alive()
    assert store.exist("later")


def test_a_key_being_replaced_needs_room_beside_its_old_value(store):
    store.put("k", bytes(400 * KIB))
    store.put("k", bytes(500 * KIB), if_exists="replace")
    assert len(store.get("k")) == 500 * KIB
    # The old value may be evicted for the new one: it is as old as anything.
    store.put("k", bytes(900 * KIB), if_exists="replace")
    assert len(store.get("k")) == 900 * KIB


def test_a_little_is_evicted_in_advance_but_never_more_than_the_reserve(world, fast):
    config = msgspec.structs.replace(fast, evict_reserve_fraction=0.1)
    store = world.store(world.engine(), lend=MIB, config=config)
    for number in range(256):
        store.put(f"{number}", bytes(4 * KIB))
    assert store.stats().evicted == 0
    store.put("one more", bytes(4 * KIB))
    assert store.stats().evicted == 1 + 25
    for number in range(25):
        store.put(f"after-{number}", bytes(4 * KIB))
    assert store.stats().evicted == 26
