"""Reads while their values are removed, replaced, evicted, or lose their lease."""

import threading
import time
from collections import Counter

import msgspec
import numpy as np
import pytest

from mooncake_store import errors, protocol
from mooncake_store.batch import Batch
from mooncake_store.local_memory import Registered
from mooncake_store.mover import Layout, Moved, Mover
from mooncake_store.reader import Reading
from mooncake_store.telemetry import ClientCounters
from mooncake_transfer import TransferConfig

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
    return (owner, other) if request.param == "own" else (other, owner)


def fill(store, content):
    """Put and evict until every free byte has been written to."""
    for number in range(60):
        key = b"fill-%d" % number
        store.put(key, content(key, 7, 64 * KIB))


def test_a_removed_value_is_hidden_at_once_and_read_to_its_end_by_who_reads_it(
    stores, world, content, eventually
):
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
    eventually(lambda: other.stats().leased_bytes == 0)


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


class Expiring:
    """A reader whose leases expire at the master while the bytes move: a client too busy to renew them."""

    def __init__(self, world, fast, content, eventually, monkeypatch, times):
        config = msgspec.structs.replace(fast, lease_ttl_s=1.0)
        engine, self.engine = world.engine(), world.engine()
        self.owner = world.store(engine, lend=2 * MIB, config=config)
        self.reader = world.store(self.engine, engine.address, config=config)
        self.value = content(b"k", 1, MIB // 2)
        self.owner.put("k", self.value)
        self.left = times
        self.reader._quick = None  # the steps of Python can be held up
        move = self.reader._mover.read

        def read(*arguments, **options):
            moved = move(*arguments, **options)
            if self.left:
                self.left -= 1
                for lease in list(self.reader._member._leases):
                    self.reader._member.let_go(lease, 0, 0.0, soon=False)
                eventually(lambda: self.owner.stats().leases == 0)
            return moved

        monkeypatch.setattr(self.reader._mover, "read", read)

    def region(self, world):
        return world.region(self.engine, bytes(MIB))


def single_reads(reader, region):
    """Each way to read the value of one key."""

    def by_pieces(key):
        opened = reader.open_value(key)
        try:
            value = opened.read(0, opened.nbytes)
            opened.close()
        finally:
            opened.give_up()
        return value

    return {
        "get": reader.get,
        "get_into": lambda key: bytes(region.view()[: reader.get_into(key, region, 0, MIB)]),
        "get_range": lambda key: reader.get_range(key, 0, MIB // 2),
        "open_value": by_pieces,
    }


@pytest.mark.parametrize("how", ["get", "get_into", "get_range"])
def test_a_read_whose_lease_has_expired_is_made_once_more(world, fast, content, eventually, monkeypatch, how):
    there = Expiring(world, fast, content, eventually, monkeypatch, times=1)
    assert single_reads(there.reader, there.region(world))[how]("k") == there.value
    assert there.left == 0


@pytest.mark.parametrize("how", ["get", "get_into", "get_range", "open_value"])
def test_an_expired_lease_is_no_missing_key(world, fast, content, eventually, monkeypatch, how):
    there = Expiring(world, fast, content, eventually, monkeypatch, times=2)
    read = single_reads(there.reader, there.region(world))[how]
    with pytest.raises(errors.LeaseExpired, match="retry is safe"):
        read("k")
    with pytest.raises(errors.KeyNotFound):
        read("unknown")


def test_a_batch_whose_lease_has_expired_is_read_once_more_and_then_says_so_of_each_key(
    world, fast, content, eventually, monkeypatch
):
    there = Expiring(world, fast, content, eventually, monkeypatch, times=1)
    region, nbytes = there.region(world), len(there.value)

    def read():
        return there.reader.batch_get_into(["k", "unknown"], region, [0, nbytes], nbytes)

    assert read() == [True, False]
    assert bytes(region.view()[:nbytes]) == there.value
    there.left = 2
    with pytest.raises(errors.LeaseExpired, match="1 of 2 keys") as caught:
        read()
    assert (caught.value.good, caught.value.expired) == ([False, False], [0])
    there.left = 2
    with pytest.raises(errors.LeaseExpired) as caught:
        there.reader.batch_get_parts_into(["unknown", "k"], region, [[1, 5, 0, 9]])
    assert (caught.value.good, caught.value.expired) == ([False, False], [1])


def test_a_session_whose_lease_has_expired_tells_it_from_missing_keys(
    world, fast, content, eventually, monkeypatch
):
    there = Expiring(world, fast, content, eventually, monkeypatch, times=1)
    with there.reader.read_session(["k", "unknown"]) as session:
        session.read_parts(there.region(world), [[0, 0, 0, 100]])
    assert session.good.tolist() == [False, False]
    assert session.expired.tolist() == [True, False]


def test_bytes_read_under_a_lease_that_has_expired_are_not_given_out(world, fast, content, eventually):
    config = msgspec.structs.replace(fast, lease_ttl_s=1.0)
    engine, reader_engine = world.engine(), world.engine()
    other = world.store(engine, lend=2 * MIB, config=config)
    reader = world.store(reader_engine, engine.address, config=config)
    other.put("k", content(b"k", 1, MIB))
    region = world.region(reader_engine, bytes(MIB))
    with reader._read(["k"]) as reading:
        reader._member.let_go(reading._located.lease, 0, 0.0, soon=False)
        eventually(lambda: other.stats().leases == 0)
        fill(other, content)
        reading.fetch(Registered(region), START)
    assert bytes(region.view()) != content(b"k", 1, MIB)
    assert reading.good.tolist() == [False]
    assert reading.expired.tolist() == [True]


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_read_gives_when_the_owner_left_meanwhile_is_right_or_a_miss(world, content, when):
    engine = world.engine()
    master = world.store(engine)
    owner = world.store(world.engine(), engine.address, lend=MIB)
    guest_engine = world.engine()
    guest = world.store(guest_engine, engine.address)
    value = content(b"k", 1, 100 * KIB)
    guest.put("k", value)
    region = world.region(guest_engine, bytes(100 * KIB))
    with guest._read(["k"]) as reading:
        if when == "before":
            reading.fetch(Registered(region), START)
        owner.close()
        if when == "after":
            reading.fetch(Registered(region), START)
    (good,) = reading.good.tolist()
    assert good or when == "after"
    assert not good or bytes(region.view()) == value
    assert master.stats().lost == 1
    with pytest.raises(errors.KeyNotFound):
        guest.get("k")


def test_leases_of_a_client_that_was_lost_last_until_their_deadline(world, content, eventually, fast):
    engine = world.engine()
    owner = world.store(engine, lend=2 * MIB)
    reader_engine = world.engine()
    reader = world.store(reader_engine, engine.address)
    value = content(b"k", 1, MIB)
    owner.put("k", value)
    region = world.region(reader_engine, bytes(MIB))
    reader._member._beat_due_s = time.monotonic() + 100  # so that it does not learn of what follows
    with reader._read(["k"]) as reading:
        master = owner.master
        assert master is not None
        (member,) = (m for m in master._state.context.members.all if m.client == reader._member.client)
        master._state.on_connection_lost(member.connection)  # which the client does not know of
        owner.remove("k")
        fill(owner, content)
        reading.fetch(Registered(region), START)
    assert reading.good.tolist() == [True]
    assert bytes(region.view()) == value
    eventually(lambda: owner.stats().leases == 0)


class Contest:
    """One writer that replaces values until told to stop, and readers that check all they get."""

    KEYS = tuple(b"key-%d" % number for number in range(12))
    NBYTES = 256 * KIB  # 12 of them do not fit
    LAST_VERSION = 400

    def __init__(self, content):
        self.content = content
        self.stop = threading.Event()
        self.versions = dict.fromkeys(self.KEYS, 0)
        self.failures, self.hits = [], Counter()
        self.known = {content(k, v, 16): (k, v) for k in self.KEYS for v in range(self.LAST_VERSION + 1)}

    def write(self, store):
        rng = np.random.default_rng(1)
        while not self.stop.is_set() and max(self.versions.values()) < self.LAST_VERSION:
            key = self.KEYS[int(rng.integers(len(self.KEYS)))]
            self.versions[key] += 1
            while not self.put(store, key) and not self.stop.is_set():
                pass

    def put(self, store, key):
        try:
            store.put(key, self.content(key, self.versions[key], self.NBYTES), if_exists="replace")
        except errors.StoreFull:  # a reader that stands still holds what would make room
            return False
        return True

    def read(self, store, region, seed):
        rng = np.random.default_rng(seed)
        while not self.stop.is_set():
            keys = [self.KEYS[i] for i in rng.choice(len(self.KEYS), 4, replace=False)]
            since = [self.versions[key] - 1 for key in keys]  # the last one may be on its way
            got = store.batch_get_into(keys, region, np.arange(4) * self.NBYTES, self.NBYTES)
            self.hits[seed] += sum(got)
            for at in np.flatnonzero(got).tolist():
                value = bytes(region.view()[at * self.NBYTES : (at + 1) * self.NBYTES])
                self.check(keys[at], value, since[at])

    def check(self, key, value, since):
        found, version = self.known.get(value[:16], (None, 0))
        if found != key or value != self.content(key, version, self.NBYTES):
            self.failures.append(f"{key}: not a value of this key")
        elif version < since:
            self.failures.append(f"{key}: version {version} after version {since} was put")


def test_readers_never_see_wrong_bytes_while_everything_is_replaced_and_evicted(
    stores, world, content, eventually
):
    reader, other = stores
    contest = Contest(content)
    threads = [threading.Thread(target=contest.write, args=(other,))]
    for seed in (2, 3):
        region = world.region(reader.engine, bytes(4 * contest.NBYTES))
        threads.append(threading.Thread(target=contest.read, args=(reader, region, seed)))
    for thread in threads:
        thread.start()
    try:
        contest.stop.wait(1.5)
        eventually(lambda: min(contest.hits[2], contest.hits[3]) > 0)
        eventually(lambda: other.stats().evicted > 10 and other.stats().removed > 10)
    finally:
        contest.stop.set()
        for thread in threads:
            thread.join(20)
    assert contest.failures == []
    eventually(lambda: (other.stats().leases, other.stats().reservations) == (0, 0))


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


def test_a_read_across_a_loss_of_the_master_that_is_joined_again_is_confirmed_by_it(world, fast, eventually):
    # The owner's own copies know no access key: only the master can say whose the memory was meanwhile.
    store = world.store(lend=1 << 20, config=msgspec.structs.replace(fast, recovery=True))
    store.put("k", b"1" * 1000)
    member = store._member
    with store._read(["k"]) as reading:
        member._lose(member._link, "the connection broke")
        eventually(lambda: member._link is not None)
    assert not reading.good[0]


def test_room_given_before_the_owner_joined_again_is_not_written_by_its_own_process_either(
    world, fast, eventually
):
    store = world.store(lend=1 << 20, config=msgspec.structs.replace(fast, recovery=True))
    member, engine = store._member, store.engine
    request = protocol.Reserve(
        digests=b"d" * 16, keys=[b"k"], sizes=(1000).to_bytes(8, "little"), if_exists="error", avoid=[]
    )
    reserved = member.ask(request, protocol.Reserved)
    layout = Layout(reserved.placement, np.zeros(1, dtype=np.uint64), request.epoch)
    member._lose(member._link, "the connection broke")
    eventually(lambda: member._link is not None)
    assert member._epoch == request.epoch
    store.put("new", b"1" * 1000)  # where the other was to go
    late = Registered(world.region(engine, b"!" * 1000))
    assert store._mover.write(late, layout, time.monotonic() + 5.0).failed == {0}
    assert store.get("new") == b"1" * 1000


def test_a_lease_of_before_the_client_joined_again_is_not_taken_for_one_of_now(
    world, fast, eventually, monkeypatch
):
    store = world.store(lend=1 << 20, config=fast)
    store.put("k", b"1")
    member, call = store._member, store._member._call

    def lose_meanwhile(link, request, *args):
        reply = call(link, request, *args)
        if isinstance(request, protocol.Locate):
            member._lose(link, "the connection broke")
            eventually(lambda: member._link is not None)
        return reply

    with monkeypatch.context() as patched:
        patched.setattr(member, "_call", lose_meanwhile)
        reading = store._read(["k"]).__enter__()
    assert member._epoch == reading.epoch
    assert not reading.holds()
    reading.end()
    assert not reading.good[0]


def test_a_heartbeat_answered_by_an_earlier_master_ends_no_lease_of_this_one(world, fast):
    store = world.store(lend=1 << 20, config=fast)
    store.put("k", b"1")
    with store._read(["k"]) as reading:
        lease = reading._located.lease
        late = protocol.Alive(notices=[], segments=[], expired=[lease], broken=[lease])
        store._member._renewed([lease], reading.epoch - 1, late, reading._asked_s)
        assert reading.holds()
        store._member._renewed([lease], reading.epoch, late, reading._asked_s)
        assert not reading.holds()


def test_the_own_segment_is_not_mapped_by_what_reached_it_before_it_was_joined_again(world, fast, eventually):
    store = world.store(lend=1 << 20, config=msgspec.structs.replace(fast, recovery=True))
    store.put("k", b"1")
    member, mover = store._member, store._mover
    with store._read(["k"]) as reading:
        segment = store.segment_id
        before = reading.descriptor(segment)
        assert mover.mapped(reading.epoch, segment, before) is not None
        member._lose(member._link, "the connection broke")
        eventually(lambda: member._link is not None)
        assert store.segment_id == segment
        assert mover.mapped(reading.epoch, segment, before) is None


def test_what_was_mapped_after_its_segment_was_forgotten_is_forgotten_too():
    class Remote:
        peer = type("Peer", (), {"address": "elsewhere:1"})

        def map(self):
            mover.keep_only(set(), time.monotonic())
            return b"bytes"

    class Engine:
        config = TransferConfig()

        def rails(self):
            return []

        def import_region(self, descriptor, timeout_s):
            return Remote()

    mover = Mover(Engine(), None, 1.0)
    assert bytes(mover.mapped(1, 2, b"d")) == b"bytes"
    mover.keep_only(set(), time.monotonic())
    assert mover._maps == {}


class KnowsKeys:
    """A master that has put the values of one batch in segments 1 and 2; the key of 2 has changed since."""

    checksums = False

    def __init__(self):
        self.counters = ClientCounters()
        replicas = [np.array([0, 0, segment, 0, 8], dtype="<u8").tobytes() for segment in (1, 2)]
        self.located = protocol.Located(
            lease=1,
            found=b"\1",
            sizes=np.array([8], dtype="<u8").tobytes(),
            placement=protocol.Placement(rows=replicas[0], segments={1: b"one", 2: b"old"}),
            others=replicas[1:],
        )

    def ask(self, request, answer):
        return self.located

    def let_go(self, lease, epoch, asked_s, *, soon):
        return True

    def reach(self, segments, epoch):
        newer = segments[2] == b"old"
        segments[2] = b"new"
        return newer


class RefusesOldKeys:
    """Segment 1 cannot be read, and segment 2 only with its new key."""

    tiers = None

    def __init__(self):
        self.tried = []

    def read(self, memory, layout, deadline_s, silent, *, compare):
        (segment,) = {segment for segment, _ in layout.by_segment()}
        descriptor = layout.placement.segments[segment]
        self.tried.append(descriptor)
        moved = Moved()
        if descriptor != b"new":
            moved.note(segment, [0], "refused or broken")
            moved.refused = descriptor == b"old"
        return moved


def test_a_new_key_is_asked_for_also_where_only_the_second_replica_refused_the_old_one():
    mover = RefusesOldKeys()
    with Reading(KnowsKeys(), mover, Batch("", [b"k"]), 5.0) as reading:
        reading.fetch(None, START)
    assert mover.tried == [b"one", b"old", b"one", b"new"]
    assert reading.good.tolist() == [True]
