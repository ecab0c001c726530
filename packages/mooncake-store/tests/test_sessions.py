"""Values written and read layer by layer, under one reservation and one lease."""

import msgspec
import numpy as np
import pytest

from mooncake_store import errors

KIB, MIB = 1 << 10, 1 << 20
LAYERS, LAYER_BYTES = 4, 3000
KEYS = [b"block-0", b"block-1", b"block-2"]
SIZES = [LAYERS * LAYER_BYTES] * len(KEYS)


@pytest.fixture(params=["own memory", "another process's"])
def store(request, world):
    engine = world.engine()
    owner = world.store(engine, lend=MIB)
    return owner if request.param == "own memory" else world.store(world.engine(), engine.address)


def layer_parts(layer):
    """One layer of every value: key, offset in the value, offset in the region, bytes."""
    return [(key, layer * LAYER_BYTES, key * LAYER_BYTES, LAYER_BYTES) for key in range(len(KEYS))]


def layer_bytes(content, layer):
    return b"".join(content(key, layer, LAYER_BYTES) for key in KEYS)


def test_layers_are_written_and_read_without_a_call_to_the_master_each(store, content, eventually):
    region = store.engine.allocate(len(KEYS) * LAYER_BYTES)
    with store.write_session(KEYS, SIZES) as session:
        assert session.placed.all()
        for layer in range(LAYERS):
            region.view()[:] = layer_bytes(content, layer)
            session.write_parts(region, layer_parts(layer))
            assert not any(store.batch_exist(KEYS))
    assert session.stored.all()
    for key in KEYS:
        assert store.get(key) == b"".join(content(key, layer, LAYER_BYTES) for layer in range(LAYERS))
    with store.read_session([*KEYS, b"unknown"]) as reading:
        assert reading.found.tolist() == [True, True, True, False]
        assert reading.sizes.tolist() == [*SIZES, 0]
        leases = store.stats().leases
        for layer in reversed(range(LAYERS)):
            reading.read_parts(region, layer_parts(layer))
            assert bytes(region.view()) == layer_bytes(content, layer)
    assert leases == 1
    eventually(lambda: store.stats().leases == 0)
    assert reading.good.tolist() == [True, True, True, False]


def test_only_values_all_of_whose_bytes_were_written_are_stored(store):
    buffer = bytes(SIZES[0])
    with store.write_session(KEYS, SIZES) as session:
        session.write_parts([buffer], [(0, 0, 0, 0, SIZES[0])])
        session.write_parts([buffer], [(1, 0, 0, 0, 100), (1, 0, 200, 0, SIZES[1] - 200)])
        session.write_parts([buffer], [(2, 0, 100, 0, SIZES[2] - 100), (2, 0, 0, 0, 150)])
    assert session.stored.tolist() == [True, False, True]
    assert store.batch_exist(KEYS) == [True, False, True]


def test_an_exception_in_the_middle_stores_nothing(store):
    def fail_half_way():
        with store.write_session(KEYS, SIZES) as session:
            session.write_parts([bytes(SIZES[0])], [(0, 0, 0, 0, SIZES[0])])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert not any(store.batch_exist(KEYS))
    assert store.stats().reservations == 0


def test_what_is_there_is_kept_or_replaced(store):
    store.put(KEYS[0], b"old")
    buffer = bytes(SIZES[0])
    parts = [(key, 0, 0, 0, SIZES[0]) for key in range(3)]
    with store.write_session(KEYS, SIZES) as session:
        assert session.placed.tolist() == [False, True, True]
        session.write_parts([buffer], parts)
    assert store.get(KEYS[0]) == b"old"
    with store.write_session(KEYS, SIZES, if_exists="replace") as session:
        session.write_parts([buffer], parts)
    assert session.stored.all()
    assert store.get(KEYS[0]) == buffer


def test_a_part_beyond_its_value_is_refused(store):
    with store.write_session(KEYS, SIZES) as session:
        with pytest.raises(errors.SizeMismatch, match="block-0"):
            session.write_parts([bytes(10)], [(0, 0, SIZES[0] - 5, 0, 10)])
        session.write_parts([bytes(SIZES[0])], [(0, 0, 0, 0, SIZES[0])])
    with store.read_session(KEYS) as reading, pytest.raises(errors.SizeMismatch, match="block-0"):
        reading.read_parts([bytearray(10)], [(0, 0, SIZES[0] - 5, 0, 10)])


def test_a_long_session_renews_its_reservation(world, fast, eventually):
    config = msgspec.structs.replace(fast, reservation_ttl_s=60.0)
    store = world.store(world.engine(), lend=MIB, config=config)
    half = SIZES[0] // 2
    with store.write_session(KEYS[:1], SIZES[:1]) as session:
        session.write_parts([bytes(half)], [(0, 0, 0, 0, half)])
        session._renewed_s -= 30.0  # as if so much time had passed
        before = session._renewed_s
        session.write_parts([bytes(half)], [(0, 0, half, 0, half)])
        assert session._renewed_s > before + 29.0
    assert session.stored.all()


def test_a_session_whose_reservation_has_ended_says_so(world, fast, eventually):
    store = world.store(world.engine(), lend=MIB, config=fast)
    session = store.write_session(KEYS, SIZES)
    with session:
        eventually(lambda: store.stats().reservations == 0, timeout_s=30.0)
        with pytest.raises(errors.PutFailed, match="has ended"):
            session.write_parts([np.zeros(10, np.uint8)], [(0, 0, 0, 0, 10)])
    assert not session.stored.any()
