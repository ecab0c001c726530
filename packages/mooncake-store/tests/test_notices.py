"""Telling clients which of their values have gone, and in which order."""

import struct
import threading

import msgspec
import numpy as np
import pytest

from mooncake_store._core import tenant_keys
from mooncake_store.keys import object_digests
from mooncake_store.notices import Notices

KIB, MIB = 1 << 10, 1 << 20


def stored(version, key, tenant=""):
    """A record as core/records.hpp lays it out: a value of 8 bytes in the segment of who is told."""
    extents = struct.pack("<QQQ", 1, 4096 * version, 8)
    rest = struct.pack("<QdHHI", 8, 0.0, len(tenant), 0, len(key)) + extents + tenant.encode() + key
    rest += bytes(-len(rest) % 8)
    return struct.pack("<BBBBIQ", 1, 0, 0, 1, 32 + len(rest), version) + object_digests(tenant, [key]) + rest


def gone(version, key, tenant="", tell=True):
    return struct.pack("<BBBBIQ", 2, tell, 0, 0, 32, version) + object_digests(tenant, [key])


def page(first, *frames):
    return (first, b"".join(frames))


def came_and_went(first, key, tenant=""):
    return page(first, stored(first, key, tenant), gone(first, key, tenant))


@pytest.fixture
def notices():
    made = Notices("")
    yield made
    made.close(5.0)


def test_each_notice_is_handed_out_once_in_order_however_many_answers_carry_it(notices):
    told = []
    notices.on_evicted(told.append)
    notices.restart(9, cleared=False)
    a, b, c = came_and_went(1, b"a"), came_and_went(3, b"b"), came_and_went(5, b"c")
    notices.accept(9, [a, b])
    notices.accept(9, [a, b, c])
    notices.accept(9, [b])
    notices.flush(5.0)
    assert told == [[b"a", b"b"], [b"c"]]
    assert notices.seen == 6


def test_a_writer_knows_the_keys_of_what_it_put_elsewhere(notices):
    told = []
    notices.on_evicted(told.append)
    notices.restart(9, cleared=False)
    notices.wrote(object_digests("", [b"a", b"b"]), [b"a", b"b"])
    notices.accept(9, [page(1, gone(7, b"b"), gone(8, b"unknown"))])
    notices.accept(9, [page(3, gone(9, b"b"))])
    notices.flush(5.0)
    assert told == [[b"b"]]


def test_the_ledger_has_what_was_stored_and_has_not_gone(notices):
    notices.restart(9, cleared=False)
    notices.accept(9, [page(1, stored(1, b"a"), stored(2, b"b"), gone(1, b"a"))])
    notices.accept(9, [page(4, stored(3, b"c"))])
    (part,) = notices.parts()
    assert [key for key, _ in tenant_keys(part, "", b"")] == [b"b", b"c"]
    notices.restart(10, cleared=True)
    assert list(notices.parts()) == []


def test_what_comes_is_told_once_however_many_records_say_so_and_again_when_it_comes_back(notices):
    told = []
    notices.on_change(lambda changes: told.extend((change.stored, change.version) for change in changes))
    notices.restart(9, cleared=False)
    notices.accept(9, [page(1, stored(1, b"a"), stored(1, b"a"), stored(2, b"b"))])
    notices.accept(9, [page(4, stored(1, b"a"), gone(1, b"a"), stored(1, b"a"), stored(1, b"a"))])
    notices.flush(5.0)
    assert told == [(True, 1), (True, 2), (False, 1), (True, 1)]


def test_records_of_another_version_are_refused(notices):
    notices.restart(9, cleared=False)
    for bad in (b"x", b"\x07" + stored(1, b"a")[1:], stored(1, b"a")[:-8]):
        with pytest.raises(ValueError, match="no records of this version"):
            notices.accept(9, [page(1, bad)])


def test_what_an_earlier_master_said_is_void(notices):
    told = []
    notices.on_evicted(told.append)
    notices.on_cleared(lambda: told.append("cleared"))
    notices.restart(1, cleared=False)
    notices.accept(1, [came_and_went(8, b"a")])
    notices.restart(2, cleared=True)
    notices.accept(1, [came_and_went(10, b"late")])
    notices.accept(2, [came_and_went(1, b"b")])
    notices.flush(5.0)
    assert told == [[b"a"], "cleared", [b"b"]]


def test_keys_of_other_tenants_are_not_told(notices):
    told = []
    notices.on_evicted(told.append)
    notices.restart(1, cleared=False)
    notices.accept(1, [came_and_went(1, b"k", tenant="other"), came_and_went(3, b"mine")])
    notices.accept(1, [came_and_went(5, b"k", tenant="other")])
    notices.flush(5.0)
    assert told == [[b"mine"]]
    assert notices.seen == 6


def test_a_handler_that_fails_does_not_stop_the_others(notices, caplog):
    told = []
    notices.on_evicted(lambda keys: 1 / 0)
    notices.on_evicted(told.extend)
    notices.restart(1, cleared=False)
    notices.accept(1, [came_and_went(1, b"a")])
    notices.accept(1, [came_and_went(3, b"b")])
    notices.flush(5.0)
    assert told == [b"a", b"b"]
    assert "ZeroDivisionError" in caplog.text


def test_a_handler_that_waits_for_its_own_put_is_left_behind_with_a_warning(notices, caplog):
    release = threading.Event()
    notices.on_evicted(lambda keys: release.wait(20))
    notices.restart(1, cleared=False)
    notices.accept(1, [came_and_went(1, b"a")])
    notices.flush(0.05)
    assert "has not returned within 0.05 s" in caplog.text
    release.set()


def test_the_owner_is_told_the_keys_of_what_others_make_leave_its_segment(world, eventually):
    engine = world.engine()
    owner = world.store(engine, lend=MIB)
    guest = world.store(world.engine(), engine.address)
    told = []
    owner.on_evicted(told.extend)
    for number in range(5):
        guest.put(f"key-{number}", bytes(256 * KIB))
    eventually(lambda: told == [b"key-0"])
    guest.remove("key-2")
    guest.put("key-3", b"3", if_exists="replace")  # the new value lies in the same segment
    guest.remove("key-4")
    eventually(lambda: told == [b"key-0", b"key-2", b"key-4"])


def test_who_put_a_value_elsewhere_is_told_when_it_goes_or_its_owner_does(world, eventually):
    engine = world.engine()
    master = world.store(engine)
    owner = world.store(world.engine(), engine.address, lend=MIB)
    guest = world.store(world.engine(), engine.address)
    told, nothing = [], []
    guest.on_evicted(told.extend)
    master.on_evicted(nothing.extend)
    guest.put("a", b"1")
    guest.put("b", b"2")
    master.remove("a")
    eventually(lambda: told == [b"a"])
    owner.close()
    eventually(lambda: told == [b"a", b"b"])
    assert nothing == []


def test_a_client_is_told_at_once_and_not_only_with_the_next_heartbeat(world, fast, eventually):
    engine = world.engine()
    lazy = msgspec.structs.replace(fast, heartbeat_s=60.0, lease_ttl_s=600.0)
    master = world.store(engine, config=lazy)
    for place in (world.engine(), engine):
        owner = world.store(place, engine.address, lend=MIB, config=lazy)
        told = []
        owner.on_evicted(told.extend)
        for turn in range(3):
            master.put("k", b"1")
            master.remove("k")
            eventually(lambda told=told, turn=turn: told == [b"k"] * (turn + 1))
        owner.close()


def test_what_went_before_a_put_is_told_before_the_put_returns(world):
    engine = world.engine()
    store = world.store(engine, lend=MIB)
    region = world.region(engine, bytes(64 * KIB))
    there = set()
    store.on_evicted(there.difference_update)
    keys = [f"key-{number}" for number in range(24)]
    for turn in range(60):
        batch = [keys[(5 * turn + i) % len(keys)] for i in range(5)]
        stored = store.batch_put_from(batch, region, np.zeros(5, np.int64), 64 * KIB)
        there.update(key.encode() for key, new in zip(batch, stored, strict=True) if new)
        assert there == {
            key.encode() for key, found in zip(keys, store.batch_exist(keys), strict=True) if found
        }
    assert store.stats().evicted > 100
