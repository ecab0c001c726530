"""Reads while their values are removed, replaced, evicted, or lose their lease."""

import threading
import time

import msgspec
import numpy as np
import pytest

from mooncake_store import errors
from mooncake_store.local_memory import Registered

KIB, MIB = 1 << 10, 1 << 20
START = np.zeros(1, dtype=np.uint64)


@pytest.fixture(params=["own", "shm", "tcp"])
def stores(request, world):
    """Who reads, from its own segment or another's over a driver, and who does something to the value."""
    drivers = () if request.param == "own" else (request.param,)
    engine = world.engine(*drivers)
    owner = world.store(engine, lend=2 * MIB)
    other_engine = world.engine(*drivers)
    other = world.store(other_engine, engine.address)
    owner.engine, other.engine = engine, other_engine
    return (owner, other) if request.param == "own" else (other, owner)


def fill(store, content):
    """Put and evict until every free byte has been written to."""
    for number in range(60):
        key = b"fill-%d" % number
        store.put(key, content(key, 7, 64 * KIB))


def test_a_removed_value_is_hidden_at_once_and_read_to_its_end_by_who_reads_it(stores, world, content):
    reader, other = stores
    value = content(b"k", 1, MIB)
    other.put("k", value)
    region = world.region(reader.engine, bytes(MIB))
    with reader._read(["k"]) as reading:
        other.remove("k")
        assert not reader.exist("k")
        assert other.stats().leased_bytes == MIB
        fill(other, content)
        reading.fetch(Registered(region), START)
    assert reading.good.tolist() == [True]
    assert bytes(region.view()) == value
    assert other.stats().leased_bytes == 0


def test_a_value_replaced_while_it_is_read_is_read_to_its_end_as_it_was(stores, world, content):
    reader, other = stores
    other.put("k", content(b"k", 1, 512 * KIB))
    region = world.region(reader.engine, bytes(512 * KIB))
    with reader._read(["k"]) as reading:
        other.put("k", content(b"k", 2, 600 * KIB), if_exists="replace")
        fill(other, content)
        reading.fetch(Registered(region), START)
    assert reading.good.tolist() == [True]
    assert bytes(region.view()) == content(b"k", 1, 512 * KIB)


def test_a_long_read_keeps_its_lease(world, content, fast):
    engine, reader_engine = world.engine(), world.engine()
    other, reader = world.store(engine, lend=2 * MIB), world.store(reader_engine, engine.address)
    value = content(b"k", 1, MIB)
    other.put("k", value)
    region = world.region(reader_engine, bytes(MIB))
    with reader._read(["k"]) as reading:
        until_s = time.monotonic() + 1.5 * fast.lease_ttl_s
        while time.monotonic() < until_s:
            other.put("busy", content(b"busy", 1, 256 * KIB), if_exists="replace")
            time.sleep(0.05)
        fill(other, content)
        reading.fetch(Registered(region), START)
    assert reading.good.tolist() == [True]
    assert bytes(region.view()) == value


def test_a_read_whose_lease_has_expired_is_a_miss(world, content, eventually):
    engine, reader_engine = world.engine(), world.engine()
    other, reader = world.store(engine, lend=2 * MIB), world.store(reader_engine, engine.address)
    other.put("k", content(b"k", 1, MIB))
    region = world.region(reader_engine, bytes(MIB))
    with reader._read(["k"]) as reading:
        reader._member.let_go(reading._located.lease)  # a client too busy to renew
        eventually(lambda: other.stats().leases == 0)
        fill(other, content)
        reading.fetch(Registered(region), START)
    assert bytes(region.view()) != content(b"k", 1, MIB)
    assert reading.good.tolist() == [False]


def test_a_read_is_a_miss_when_the_owner_left_meanwhile(world, content):
    engine = world.engine()
    master = world.store(engine)
    owner = world.store(world.engine(), engine.address, lend=MIB)
    guest_engine = world.engine()
    guest = world.store(guest_engine, engine.address)
    guest.put("k", content(b"k", 1, 100 * KIB))
    region = world.region(guest_engine, bytes(100 * KIB))
    with guest._read(["k"]) as reading:
        reading.fetch(Registered(region), START)
        owner.close()
    # The bytes arrived, but nobody can vouch for them any more.
    assert reading.good.tolist() == [False]
    assert master.stats().lost == 1
    with pytest.raises(errors.KeyNotFound):
        guest.get("k")


class Contest:
    """One writer that replaces values until told to stop, and readers that check all they get."""

    KEYS = tuple(b"key-%d" % number for number in range(12))
    NBYTES = 256 * KIB  # 12 of them do not fit
    LAST_VERSION = 400

    def __init__(self, content):
        self.content = content
        self.stop = threading.Event()
        self.versions = dict.fromkeys(self.KEYS, 0)
        self.failures = []
        self.known = {content(k, v, 16): (k, v) for k in self.KEYS for v in range(self.LAST_VERSION + 1)}

    def write(self, store):
        rng = np.random.default_rng(1)
        while not self.stop.is_set() and max(self.versions.values()) < self.LAST_VERSION:
            key = self.KEYS[int(rng.integers(len(self.KEYS)))]
            self.versions[key] += 1
            store.put(key, self.content(key, self.versions[key], self.NBYTES), if_exists="replace")

    def read(self, store, region, seed):
        rng = np.random.default_rng(seed)
        hits = 0
        while not self.stop.is_set():
            keys = [self.KEYS[i] for i in rng.choice(len(self.KEYS), 4, replace=False)]
            since = [self.versions[key] - 1 for key in keys]  # the last one may be on its way
            got = store.batch_get_into(keys, region, np.arange(4) * self.NBYTES, self.NBYTES)
            hits += sum(got)
            for at in np.flatnonzero(got).tolist():
                value = bytes(region.view()[at * self.NBYTES : (at + 1) * self.NBYTES])
                self.check(keys[at], value, since[at])
        if not hits:
            self.failures.append("a reader never had a hit")

    def check(self, key, value, since):
        found, version = self.known.get(value[:16], (None, 0))
        if found != key or value != self.content(key, version, self.NBYTES):
            self.failures.append(f"{key}: not a value of this key")
        elif version < since:
            self.failures.append(f"{key}: version {version} after version {since} was put")


def test_readers_never_see_wrong_bytes_while_everything_is_replaced_and_evicted(stores, world, content):
    reader, other = stores
    contest = Contest(content)
    threads = [threading.Thread(target=contest.write, args=(other,))]
    for seed in (2, 3):
        region = world.region(reader.engine, bytes(4 * contest.NBYTES))
        threads.append(threading.Thread(target=contest.read, args=(reader, region, seed)))
    for thread in threads:
        thread.start()
    contest.stop.wait(1.5)
    contest.stop.set()
    for thread in threads:
        thread.join(20)
    assert contest.failures == []
    stats = other.stats()
    assert stats.evicted > 10
    assert stats.removed > 10
    assert (stats.leases, stats.reservations) == (0, 0)


def test_a_value_put_in_parts_is_read_in_one_piece(world, content, fast):
    engine = world.engine()
    store = world.store(engine, lend=MIB)
    for number in range(16):
        store.put(f"{number}", bytes(64 * KIB))
    for number in (1, 4, 7, 10):
        store.remove(f"{number}")
    value = content(b"k", 1, 256 * KIB - 9)
    guest = world.store(world.engine(), engine.address, config=msgspec.structs.replace(fast, put_wait_s=0.0))
    guest.put("parts", value)
    assert guest.get("parts") == store.get("parts") == value
    assert store.stats().evicted == 0
