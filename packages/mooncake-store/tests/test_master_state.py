"""What the master decides, step by step, on a virtual clock."""

import msgspec
import numpy as np
import pytest

from mooncake_store import protocol
from mooncake_store._core import read_records
from mooncake_store._errors import MasterRefused
from mooncake_store.config import StoreConfig
from mooncake_store.keys import object_digests
from mooncake_store.master.state import MasterState
from mooncake_store.protocol import Outcome

GRANULE = 4096
GONE, TELL = 2, 1  # see core/records.hpp
CONFIG = StoreConfig(lease_ttl_s=10.0, reservation_ttl_s=7.0, evict_reserve_fraction=0.0)


class Master:
    """A state with a clock, asked by clients whose connection has the number of the client."""

    def __init__(self, config=CONFIG):
        self.state = MasterState(5, config)
        self.now_s = 100.0

    def mount(self, client, granules, connection=None, tenant=""):
        request = protocol.Mount(
            client=client,
            nbytes=granules * GRANULE,
            descriptor=b"d%d" % client,
            segment=client,
            tenant=tenant,
        )
        return self.state.handle(
            request, client if connection is None else connection, f"host:{client}", self.now_s
        )

    def ask(self, client, request, epoch=5):
        request.epoch, request.client = epoch, client
        return self.state.handle(request, client, f"host:{client}", self.now_s)

    def reserve(self, client, keys, granules=1, if_exists="keep", avoid=()):
        return self.ask(
            client,
            protocol.Reserve(
                digests=object_digests("", keys),
                keys=keys,
                sizes=np.full(len(keys), granules * GRANULE, dtype="<u8").tobytes(),
                if_exists=if_exists,
                avoid=list(avoid),
            ),
        )

    def commit(self, client, reserved, failed=(), if_exists="keep", seen=0):
        return self.ask(
            client,
            protocol.Commit(
                reservation=reserved.reservation,
                failed=list(failed),
                if_exists=if_exists,
                notices_seen=seen,
            ),
        )

    def put(self, client, keys, granules=1, **options):
        return self.commit(client, self.reserve(client, keys, granules, **options), **options)

    def locate(self, client, keys):
        return self.ask(client, protocol.Locate(digests=object_digests("", keys)))

    def release(self, client, located):
        return self.ask(client, protocol.Release(lease=located.lease))

    def exist(self, client, keys):
        return list(self.ask(client, protocol.Exist(digests=object_digests("", keys))).found)

    def beat(self, client, leases=(), seen=0):
        return self.ask(client, protocol.Heartbeat(leases=list(leases), notices_seen=seen))

    def later(self, seconds):
        self.now_s += seconds
        self.state.on_tick(self.now_s)


@pytest.fixture
def master():
    made = Master()
    made.mount(1, 4)
    made.mount(2, 0)
    return made


def keys_of(pages):
    """Keys of what is told to be gone."""
    records = [record for _, frames in pages for record in read_records(frames)]
    names = {object_digests("", [b"%c" % code]): b"%c" % code for code in range(97, 123)}
    return [names[digest] for kind, flags, _, digest, *_ in records if kind == GONE and flags & TELL]


def test_nothing_is_found_before_its_commit(master):
    reserved = master.reserve(2, [b"a"])
    assert master.exist(2, [b"a"]) == [0]
    assert master.locate(2, [b"a"]).lease == 0
    assert list(master.commit(2, reserved).outcomes) == [Outcome.STORED]
    assert master.exist(2, [b"a"]) == [1]


def test_of_two_writers_of_a_key_the_first_to_commit_keeps_it(master):
    slow, quick = master.reserve(1, [b"a"]), master.reserve(2, [b"a"])
    assert list(master.commit(2, quick).outcomes) == [Outcome.STORED]
    assert list(master.commit(1, slow).outcomes) == [Outcome.EXISTS]
    assert master.state.stats().free_bytes == 3 * GRANULE


def test_values_given_up_stay_exposed_until_the_reservation_would_have_ended(master):
    reserved = master.reserve(2, [b"a", b"b"], granules=2)
    assert list(master.commit(2, reserved, failed=[1]).outcomes) == [Outcome.STORED, Outcome.FAILED]
    assert master.state.stats().reserved_bytes == 2 * GRANULE
    master.later(6.9)
    assert master.state.stats().reserved_bytes == 2 * GRANULE
    assert master.state.next_deadline_s() == pytest.approx(107.0)
    master.later(0.2)
    assert (master.state.stats().reserved_bytes, master.state.next_deadline_s()) == (0, None)


@pytest.mark.parametrize("position", [2, 10**6, -1, 2**40])
def test_a_commit_that_names_values_beyond_its_reservation_stores_nothing_and_keeps_no_room(master, position):
    reserved = master.reserve(2, [b"a", b"b"])
    with pytest.raises(MasterRefused, match=f"position {position}"):
        master.commit(2, reserved, failed=[position])
    assert master.state.stats().reserved_bytes == 2 * GRANULE, "its writer may still write"
    master.later(7.1)
    assert master.state.stats().free_bytes == 4 * GRANULE
    assert master.exist(2, [b"a", b"b"]) == [0, 0]


@pytest.mark.parametrize("keys", [[], [b"a"], [b"a", b"b", b"c"]])
def test_digests_without_as_many_keys_reserve_nothing(master, keys):
    digests, sizes = object_digests("", [b"a", b"b"]), np.full(2, GRANULE, dtype="<u8").tobytes()
    with pytest.raises(MasterRefused, match=f"{len(keys)} keys"):
        master.ask(2, protocol.Reserve(digests=digests, keys=keys, sizes=sizes, if_exists="keep", avoid=[]))
    stats = master.state.stats()
    assert (stats.reservations, stats.free_bytes) == (0, 4 * GRANULE)


def test_a_reservation_that_expired_cannot_be_committed(master):
    reserved = master.reserve(2, [b"a"])
    master.later(7.0)
    assert master.commit(2, reserved).outcomes == b""
    assert master.exist(2, [b"a"]) == [0]
    assert master.state.stats().free_bytes == 4 * GRANULE


def test_a_lease_that_is_renewed_outlives_its_time_and_one_that_is_not_does_not(master):
    master.put(1, [b"a", b"b"])
    kept, left = master.locate(2, [b"a"]), master.locate(2, [b"b"])
    for _ in range(3):
        master.later(6.0)
        master.beat(2, leases=[kept.lease])
    assert master.state.stats().leases == 1
    assert master.release(2, kept) == protocol.Released(expired=False, broken=[])
    assert master.release(2, left).expired


def test_a_heartbeat_is_told_of_leases_under_which_an_owner_was_lost_and_of_no_others(master):
    master.mount(3, 4)
    master.put(1, [b"a"])
    master.put(3, [b"b"])
    one, both, other = (master.locate(2, keys) for keys in ([b"a"], [b"a", b"b"], [b"b"]))
    leases = [located.lease for located in (one, both, other)]
    assert master.beat(2, leases).broken == []
    master.mount(1, 4)  # again, which ends what it had
    later = master.locate(2, [b"b"]).lease
    told = master.beat(2, [*leases, later])
    assert (told.broken, told.expired) == (leases[:2], [])
    master.release(2, one)
    master.mount(3, 4)
    assert master.state.context.broken_leases == {both.lease, other.lease, later}


def test_a_lease_of_another_client_can_neither_be_renewed_nor_ended(master):
    master.put(1, [b"a"])
    located = master.locate(1, [b"a"])
    assert master.release(2, located).expired
    master.later(6.0)
    master.beat(2, leases=[located.lease])
    master.later(6.0)
    assert master.state.stats().leases == 0


def test_requests_for_another_master_or_from_strangers_have_no_effect(master):
    request = protocol.Remove(digests=object_digests("", [b"a"]))
    master.put(1, [b"a"])
    assert "started anew" in master.ask(1, request, epoch=4).reason
    assert "lost the connection" in master.ask(9, request).reason
    master.mount(2, 0, connection=77)
    assert "lost the connection" in master.ask(2, request).reason
    assert master.exist(1, [b"a"]) == [1]


def test_who_joins_again_has_left_before(master):
    master.put(2, [b"a"])
    located = master.locate(2, [b"a"])
    first = master.state.stats()
    mounted = master.mount(1, 2)
    stats = master.state.stats()
    assert (stats.capacity_bytes, stats.objects, stats.lost) == (2 * GRANULE, 0, 1)
    assert first.clients == stats.clients == 2
    assert mounted.segment == 1
    assert master.release(2, located) == protocol.Released(expired=False, broken=[0])


def test_only_what_lay_with_the_lost_owner_is_lost(master):
    master.mount(3, 8)
    master.put(1, [b"a"])
    master.put(3, [b"b"])
    pending = master.reserve(3, [b"c", b"d"], granules=2, avoid=[1])
    located = master.locate(2, [b"a", b"b"])
    master.state.on_connection_lost(1)
    assert master.exist(2, [b"a", b"b"]) == [0, 1]
    assert master.release(2, located).broken == [0]
    assert list(master.commit(3, pending).outcomes) == [Outcome.STORED] * 2


def test_what_was_reserved_with_a_lost_owner_is_lost_at_its_commit(master):
    reserved = master.reserve(2, [b"a"])
    master.state.on_connection_lost(1)
    assert list(master.commit(2, reserved).outcomes) == [Outcome.LOST]
    assert master.exist(2, [b"a"]) == [0]


def test_waiting_is_advised_only_when_others_hold_what_is_missing(master):
    assert not master.reserve(1, [b"a"] * 5).wait
    master.later(8.0)
    master.put(1, [b"a", b"b"])
    located = master.locate(2, [b"a"])
    reply = master.reserve(1, [b"c"], granules=4)
    assert (list(reply.outcomes), reply.wait) == ([Outcome.FULL], True)
    assert reply.room == (4 * GRANULE, 2 * GRANULE, GRANULE, GRANULE, 0)
    master.release(2, located)
    assert list(master.reserve(1, [b"c"], granules=4).outcomes) == [Outcome.PLACED]


def test_the_values_of_a_batch_that_are_there_do_not_make_room_for_the_others(master):
    master.put(1, [b"a", b"b", b"x", b"y"])
    reply = master.reserve(1, [b"a", b"b", b"c", b"d", b"e"])
    assert [Outcome(o).name for o in reply.outcomes] == ["EXISTS", "EXISTS", "PLACED", "PLACED", "FULL"]
    assert master.exist(1, [b"a", b"b", b"x", b"y"]) == [1, 1, 0, 0]


def test_notices_are_repeated_until_they_are_confirmed(master):
    master.put(1, [b"a", b"b"])
    remove = protocol.Remove(digests=object_digests("", [b"a"]))
    master.ask(2, remove)
    assert keys_of(master.beat(1).notices) == [b"a"]
    master.ask(2, protocol.Remove(digests=object_digests("", [b"b"])))
    notices = master.beat(1).notices
    assert keys_of(notices) == [b"a", b"b"]
    assert keys_of(master.beat(1, seen=notices[-1][0] - 1).notices) == [b"b"]
    assert master.beat(1, seen=notices[-1][0]).notices == []


def test_a_commit_brings_the_notices_of_what_was_evicted_for_it(master):
    master.put(1, [b"a", b"b", b"c", b"d"])
    reserved = master.reserve(1, [b"e"], granules=2)
    notices = master.commit(1, reserved).notices
    assert keys_of(notices) == [b"d", b"c"]


def test_an_owner_is_rung_once_until_it_has_fetched(master):
    master.put(1, [b"a", b"b", b"c"])
    for key in (b"a", b"b"):
        master.ask(2, protocol.Remove(digests=object_digests("", [key])))
    assert [(m.client, m.address) for m in master.state.take_to_ring()] == [(1, "host:1")]
    master.ask(2, protocol.Remove(digests=object_digests("", [b"c"])))
    assert master.state.take_to_ring() == []
    master.beat(1)
    master.put(2, [b"a"])
    master.ask(1, protocol.Remove(digests=object_digests("", [b"a"])))
    assert sorted(m.client for m in master.state.take_to_ring()) == [1, 2]


def test_an_owner_that_reads_no_notices_is_taken_for_dead():
    master = Master(msgspec.structs.replace(CONFIG, max_unread_notices=3))
    master.mount(1, 4)
    master.mount(2, 0)
    for number in range(4):
        master.put(2, [b"%d" % number])
        master.ask(2, protocol.Remove(digests=object_digests("", [b"%d" % number])))
        master.beat(2, seen=2 * number + 10)
        master.later(0.1)
    assert master.state.stats().capacity_bytes == 0
    assert isinstance(master.beat(1), protocol.Stale)


def test_a_client_that_is_silent_for_too_long_is_taken_for_dead(master):
    master.put(2, [b"a"])
    for _ in range(4):
        master.later(9.0)
        master.beat(2)
    stats = master.state.stats()
    assert (stats.clients, stats.capacity_bytes, stats.lost) == (1, 0, 1)
    assert isinstance(master.beat(1), protocol.Stale)


def test_hits_and_misses_count_keys(master):
    master.put(1, [b"a", b"b"])
    master.release(2, master.locate(2, [b"a", b"b", b"c"]))
    master.locate(2, [b"d"])
    stats = master.state.stats()
    assert (stats.hits, stats.misses, stats.stored, stats.leases) == (2, 2, 2, 0)
