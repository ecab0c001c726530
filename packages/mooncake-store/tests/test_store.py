"""The store as users meet it, with real engines in one process, over each driver."""

import msgspec
import numpy as np
import pytest

from mooncake_store import Master, Store, errors
from mooncake_transfer.errors import MemoryUnavailable, TransferError

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(params=["shm", "tcp"])
def pair(request, world):
    """An owner with the master and a segment, and a guest without one that reaches it over one driver."""
    owner_engine, guest_engine = world.engine(request.param), world.engine(request.param)
    owner = world.store(owner_engine, lend=16 * MIB)
    guest = world.store(guest_engine, owner_engine.address)
    guest.driver = request.param
    return owner, guest


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 5 * MIB + 3])
def test_what_one_puts_the_other_gets(pair, content, nbytes):
    value = content(b"k", 1, nbytes)
    for here, there in (pair, pair[::-1]):
        here.put(f"key-{nbytes}", value)
        assert there.get(f"key-{nbytes}".encode()) == here.get(f"key-{nbytes}") == value
        there.remove(f"key-{nbytes}")


def test_bytes_move_straight_between_region_and_segment(pair, content, world):
    _, guest = pair
    value = content(b"z", 1, 3 * MIB)
    region = world.region(guest.engine, value + bytes(4 * MIB))
    before = guest.engine.stats()[guest.driver]
    guest.put_from("z", region, 0, len(value))
    assert guest.get_into("z", region, 3 * MIB, 4 * MIB) == len(value)
    after = guest.engine.stats()[guest.driver]
    assert bytes(region.view()[3 * MIB : 6 * MIB]) == value
    assert after["bytes_written"] - before["bytes_written"] == len(value)
    assert after["bytes_read"] - before["bytes_read"] == len(value)
    assert guest._staging._idle == []


def test_a_batch_is_stored_and_read_with_a_miss_for_each_key_that_is_not_there(pair, content, world):
    owner, guest = pair
    keys = [b"block-%d" % i for i in range(40)]
    sizes = np.arange(40) * 1000
    offsets = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    data = b"".join(content(key, 1, int(size)) for key, size in zip(keys, sizes, strict=True))
    region = world.region(guest.engine, data)
    assert guest.batch_put_from(keys, region, offsets, sizes) == [True] * 40
    assert guest.batch_put_from(keys, region, offsets, sizes) == [False] * 40
    for reader in (guest, owner):
        back = world.region(reader.engine, bytes(len(data)))
        asked = [b"nothing" if i % 7 == 3 else key for i, key in enumerate(keys)]
        got = reader.batch_get_into(asked, back, offsets, np.where(np.arange(40) % 7 == 3, 5, sizes))
        assert got == [i % 7 != 3 for i in range(40)]
        for i, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
            if got[i]:
                assert bytes(back.view()[offset : offset + size]) == data[offset : offset + size]


def test_this_process_s_own_segment_is_reached_without_the_engine(world, content, monkeypatch):
    engine = world.engine()
    store = world.store(engine, lend=4 * MIB)
    region = world.region(engine, content(b"a", 1, MIB) + bytes(MIB))

    def refuse(*args, **kwargs):
        raise AssertionError("the engine was asked to move bytes or to call itself")

    for name in ("read", "write", "import_region", "connect"):
        monkeypatch.setattr(engine, name, refuse)
    store.put_from("a", region, 0, MIB)
    assert store.get_into("a", region, MIB, MIB) == MIB
    assert region.view()[MIB:] == region.view()[:MIB]
    assert store.get("a") == content(b"a", 1, MIB)
    store.put("b", b"also without a copy in between")
    assert store.batch_exist(["a", "b", "c"]) == [True, True, False]


def test_an_existing_key_is_an_error_kept_or_replaced_as_asked(pair):
    owner, guest = pair
    guest.put("k", b"first")
    with pytest.raises(errors.KeyExists, match="'k' exists"):
        owner.put("k", b"second")
    owner.put("k", b"second", if_exists="keep")
    assert owner.get("k") == b"first"
    owner.put("k", b"third", if_exists="replace")
    assert guest.get("k") == b"third"
    with pytest.raises(errors.ConfigError, match="if_exists is 'overwrite'"):
        owner.put("k", b"", if_exists="overwrite")


def test_of_one_key_twice_in_a_batch_the_first_is_kept_and_the_last_replaces(pair, world):
    _, guest = pair
    region = world.region(guest.engine, b"abcd")
    assert guest.batch_put_from(["k", "k"], region, [0, 1], 1) == [True, False]
    assert guest.get("k") == b"a"
    assert guest.batch_put_from(["k", "k"], region, [2, 3], 1, if_exists="replace") == [True, True]
    assert guest.get("k") == b"d"
    with pytest.raises(errors.KeyExists, match="1 of 2 keys exist"):
        guest.batch_put_from(["k", "new"], region, [0, 1], 1, if_exists="error")
    assert guest.get("new") == b"b"


def test_a_missing_key_is_not_found_by_any_call(pair, world):
    owner, guest = pair
    region = world.region(guest.engine, b"12345678")
    for store in (owner, guest):
        for call in (lambda s: s.get("no"), lambda s: s.remove("no")):
            with pytest.raises(errors.KeyNotFound, match="'no'"):
                call(store)
        assert not store.exist("no")
        assert store.batch_remove(["no"]) == [False]
    with pytest.raises(KeyError, match="'no'"):
        guest.get_into("no", region, 0, 8)


def test_a_removed_key_can_be_put_again(pair):
    owner, guest = pair
    guest.put("k", b"1")
    owner.remove("k")
    assert not guest.exist("k")
    guest.put("k", b"22")
    assert owner.get("k") == b"22"


def test_a_value_of_another_size_than_asked_for_is_an_error_and_not_a_short_read(pair, world):
    _, guest = pair
    guest.put("k", b"12345")
    region = world.region(guest.engine, b"........")
    with pytest.raises(errors.SizeMismatch, match="has 5 bytes, room is for 4"):
        guest.get_into("k", region, 0, 4)
    with pytest.raises(errors.SizeMismatch, match="has 5 bytes, 6 were asked for"):
        guest.batch_get_into(["no", "k"], region, [0, 0], [6, 6])
    assert bytes(region.view()) == b"........"
    assert guest.stats().leases == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s, r: s.put("k", 5), "not int"),
        (lambda s, r: s.put("k", memoryview(b"abcdef")[::2]), "not contiguous"),
        (lambda s, r: s.put(5, b""), "not int"),
        (lambda s, r: s.put("", b""), "empty"),
        (lambda s, r: s.put_from("k", r, 8, 9), "9 bytes at offset 8"),
        (lambda s, r: s.put_from("k", r, -1, 1), "negative"),
        (lambda s, r: s.get_into("k", r, 2**64 - 1, 2), "not inside"),
        (lambda s, r: s.batch_put_from(["a", "b"], r, [0], 1), "2 integers"),
        (lambda s, r: s.batch_put_from(["a"], r, [0.5], 1), "float64"),
        (lambda s, r: s.batch_get_into("ab", r, [0, 1], 1), "one key"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_happens(world, call, says):
    engine = world.engine()
    store = world.store(engine, lend=MIB)
    region = world.region(engine, bytes(16))
    with pytest.raises(errors.StoreError, match=says):
        call(store, region)
    assert (store.stats().objects, store.stats().reservations) == (0, 0)


@pytest.mark.parametrize("driver", ["shm", "tcp"])
def test_a_region_of_another_engine_or_a_closed_one_is_a_mistake_and_not_a_miss(world, driver):
    engine = world.engine(driver)
    world.store(engine, lend=MIB)
    guest_engine = world.engine(driver)
    guest = world.store(guest_engine, engine.address)
    foreign, closed = world.region(engine, b"12345678"), world.region(guest_engine, b"12345678")
    closed.close()
    guest.put("k", b"12345678")
    for region, says in ((foreign, "another engine"), (closed, "closed")):
        with pytest.raises(TransferError, match=says):
            guest.put_from("new", region, 0, 8)
        with pytest.raises(TransferError, match=says):
            guest.get_into("k", region, 0, 8)
    assert not guest.exist("new")
    assert guest.stats().leases == 0


def test_empty_batches_do_nothing(world):
    engine = world.engine()
    store = world.store(engine, lend=MIB)
    region = world.region(engine, b"x")
    assert store.batch_put_from([], region, [], []) == []
    assert store.batch_get_into([], region, np.array([], dtype=np.int64), 4) == []
    assert store.batch_exist([]) == store.batch_remove([]) == []


def test_tenants_do_not_see_each_other(world, fast):
    engine = world.engine()
    red = world.store(engine, lend=MIB)
    blue = world.store(world.engine(), engine.address, config=msgspec.structs.replace(fast, tenant="blue"))
    red.put("k", b"red")
    assert not blue.exist("k")
    blue.put("k", b"blue")
    assert (red.get("k"), blue.get("k")) == (b"red", b"blue")


def test_a_value_larger_than_any_hole_is_spread_over_segments(world, content):
    first = world.engine()
    owners = [world.store(first, lend=MIB), world.store(world.engine(), first.address, lend=MIB)]
    guest = world.store(world.engine(), first.address)
    value = content(b"big", 1, MIB + 512 * KIB)
    guest.put("big", value)
    assert guest.get("big") == owners[0].get("big") == owners[1].get("big") == value
    assert guest.stats().free_bytes == 512 * KIB


def test_values_go_to_the_own_segment_first_and_then_to_the_emptiest(world):
    first = world.engine()
    small = world.store(first, lend=256 * KIB)
    large = world.store(world.engine(), first.address, lend=MIB)
    for number in range(4):
        small.put(f"own-{number}", bytes(64 * KIB))
    small.put("overflow", bytes(64 * KIB))
    assert small.stats().evicted == 0
    large.close()
    assert [small.exist(f"own-{number}") for number in range(4)] == [True] * 4
    assert not small.exist("overflow")


def test_several_clients_share_one_engine_and_its_master(world, content):
    engine = world.engine()
    first = world.store(engine, lend=MIB)
    by_address = world.store(engine, engine.address, lend=MIB)
    by_object = world.store(engine, first.master)
    value = content(b"k", 1, 100_000)
    by_object.put("k", value)
    assert first.get("k") == by_address.get("k") == value
    assert first.stats().clients == 3
    with pytest.raises(errors.ConfigError, match="serves a store master already"):
        Store(engine)


def test_a_master_can_follow_another_one_on_the_same_engine(world):
    engine = world.engine()
    with Store(engine, lend_bytes=MIB) as store:
        store.put("k", b"1")
    with Store(engine, lend_bytes=MIB) as store:
        assert not store.exist("k")


def test_memory_that_is_not_there_is_refused_with_the_numbers(world):
    engine = world.engine()
    with pytest.raises(MemoryUnavailable, match=r"needs \d+ bytes.*available"):
        Store(engine, lend_bytes=1 << 50)
    with pytest.raises(errors.ConfigError, match="lend_bytes is -1"):
        Store(engine, lend_bytes=-1)
    with Store(engine, lend_bytes=MIB) as store:  # nothing of the failed ones is in the way
        store.put("k", b"1")


def test_a_closed_store_says_so(world):
    engine = world.engine()
    master = world.stack.enter_context(Master(engine))
    store = world.store(engine, master, lend=MIB)
    region = world.region(engine, b"x")
    store.put("k", b"1")
    store.close()
    store.close()
    for call in (lambda: store.get("k"), lambda: store.put_from("k", region, 0, 1), store.stats):
        with pytest.raises(errors.StoreClosed):
            call()
    assert (master.stats().clients, master.stats().objects, master.stats().capacity_bytes) == (0, 0, 0)
