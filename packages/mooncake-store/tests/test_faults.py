"""Processes that die, hang, restart, or were never there."""

import socket
import time

import msgspec
import numpy as np
import pytest

from mooncake_store import Master, Store, errors, protocol
from mooncake_store.local_memory import Registered
from mooncake_store.mover import Layout
from mooncake_transfer import Transfer
from mooncake_transfer.testing.stopping import stopped_process

KIB, MIB = 1 << 10, 1 << 20
DRIVERS = pytest.mark.parametrize("driver", ["shm", "tcp"])


@pytest.fixture
def settings(fast):
    return msgspec.to_builtins(fast)


def seconds(call):
    started_s = time.monotonic()
    call()
    return time.monotonic() - started_s


@DRIVERS
def test_a_writer_killed_in_mid_put_leaves_nothing(world, eventually, settings, driver):
    engine = world.engine(driver)
    store = world.store(engine, lend=MIB)
    writer = world.child(drivers=[driver], master=engine.address, config=settings)
    writer.tell(do="put_and_hang_before_commit", key="half", nbytes=800 * KIB)
    assert writer.answer()["result"] == "written"
    assert (store.stats().reserved_bytes, store.exist("half")) == (800 * KIB, False)
    writer.kill()
    eventually(lambda: store.stats().clients == 1)
    assert not store.exist("half")
    # The room comes back by itself, and is whole.
    eventually(lambda: store.stats().free_bytes == MIB)
    store.put("half", bytes(MIB))
    assert store.get("half") == bytes(MIB)


@DRIVERS
def test_a_reader_killed_in_mid_read_gives_its_lease_back(world, eventually, settings, driver):
    engine = world.engine(driver)
    store = world.store(engine, lend=MIB)
    store.put("k", bytes(800 * KIB))
    reader = world.child(drivers=[driver], master=engine.address, config=settings)
    reader.tell(do="read_and_hang_before_release", key="k")
    assert reader.answer()["result"] == "reading"
    with pytest.raises(errors.StoreFull):
        store.put("other", bytes(800 * KIB))
    reader.kill()
    eventually(lambda: store.stats().leases == 0)
    store.put("other", bytes(800 * KIB))


@DRIVERS
def test_a_killed_owner_s_values_are_misses_and_its_keys_can_be_put_again(
    world, eventually, settings, fast, content, driver
):
    engine = world.engine(driver)
    world.store(engine, lend=MIB)
    owner = world.child(drivers=[driver], master=engine.address, lend=4 * MIB, config=settings)
    owner.ask(do="put", key="k", version=1, nbytes=MIB)
    guest_engine = world.engine(driver)
    guest = world.store(guest_engine, engine.address)
    region = world.region(guest_engine, bytes(MIB))
    assert guest.get("k") == content(b"k", 1, MIB)
    owner.kill()
    got = []
    assert (
        seconds(lambda: got.extend(guest.batch_get_into(["k"], region, [0], MIB))) < fast.transfer_timeout_s
    )
    # Whether the loss was known already or not: a miss, or the whole right value.
    assert got == [False] or bytes(region.view()) == content(b"k", 1, MIB)
    eventually(lambda: not guest.exist("k"))
    with pytest.raises(errors.KeyNotFound):
        guest.get("k")
    guest.put("k", content(b"k", 2, 100 * KIB))
    assert guest.get("k") == content(b"k", 2, 100 * KIB)


def test_a_put_to_an_owner_that_just_died_goes_elsewhere(world, fast, content):
    engine = world.engine("tcp")
    store = world.store(engine, lend=MIB)
    dying_engine = world.engine("tcp")
    dying = world.store(dying_engine, engine.address, lend=4 * MIB)
    guest = world.store(world.engine("tcp"), engine.address)
    # The memory goes away under the master's nose, which still hands it out.
    dying.segment.close()
    guest.put("k", content(b"k", 1, 200 * KIB))
    assert guest.get("k") == store.get("k") == content(b"k", 1, 200 * KIB)
    with pytest.raises(errors.PutFailed, match=r"'large' was not stored.*region"):
        guest.put("large", bytes(3 * MIB))
    assert not guest.exist("large")


@DRIVERS
def test_what_cannot_be_reached_is_a_miss_and_the_rest_of_the_batch_is_read(world, content, driver):
    engine = world.engine(driver)
    store = world.store(engine, lend=MIB)
    dying = world.store(world.engine(driver), engine.address, lend=MIB)
    store.put("here", content(b"here", 1, 100 * KIB))
    dying.put("there", content(b"there", 1, 100 * KIB))
    guest_engine = world.engine(driver)
    guest = world.store(guest_engine, engine.address)
    region = world.region(guest_engine, bytes(300 * KIB))
    dying.segment.close()
    keys, offsets = ["there", "here", "there"], np.arange(3) * 100 * KIB
    assert guest.batch_get_into(keys, region, offsets, 100 * KIB) == [False, True, False]
    assert bytes(region.view()[100 * KIB : 200 * KIB]) == content(b"here", 1, 100 * KIB)
    with pytest.raises(errors.KeyNotFound, match="lost with its owner"):
        guest.get("there")
    assert guest.stats().leases == 0


def test_an_interrupted_put_leaves_no_transfer_running_and_no_reservation(world, monkeypatch):
    engine = world.engine("tcp")
    world.store(engine, lend=32 * MIB)
    guest = world.store(world.engine("tcp"), engine.address)
    transfers, cancelled = [], []
    cancel = Transfer.cancel

    def interrupt(self, segment, blocks, transfer):
        transfers.append(transfer)
        raise KeyboardInterrupt

    monkeypatch.setattr("mooncake_store.mover._Move._finish", interrupt)
    monkeypatch.setattr(Transfer, "cancel", lambda self: (cancelled.append(self), cancel(self)))
    with pytest.raises(KeyboardInterrupt):
        guest.put("k", bytes(24 * MIB))
    assert len(transfers) == 1
    assert cancelled == transfers
    assert transfers[0].done()
    assert guest.stats().reservations == 0
    assert not guest.exist("k")


@DRIVERS
def test_readers_see_only_whole_values_while_a_process_that_replaces_them_is_killed(
    world, eventually, settings, content, driver
):
    engine = world.engine(driver)
    store = world.store(engine, lend=2 * MIB)
    keys = [f"key-{number}" for number in range(4)]
    known = {content(k.encode(), v, 16): (k, v) for k in keys for v in range(2000)}
    for round_ in range(3):
        writer = world.child(drivers=[driver], master=engine.address, config=settings)
        writer.ask(do="overwrite_for_ever", keys=keys, nbytes=150 * KIB)
        seen = set()
        eventually(lambda seen=seen: _look(store, keys, known, content, seen) > 40)
        writer.kill()
        assert _look(store, keys, known, content, seen) > 40, f"round {round_}"
    eventually(lambda: store.stats().reserved_bytes == 0)


def _look(store, keys, known, content, seen):
    for key in keys:
        try:
            value = store.get(key)
        except errors.KeyNotFound:
            continue
        assert value[:16] in known, "bytes of no version that was ever put"
        assert known[value[:16]][0] == key
        assert value == content(key.encode(), known[value[:16]][1], len(value))
        seen.add(known[value[:16]])
    return len(seen)


def test_clients_come_back_to_a_master_that_was_killed_and_restarted(
    world, eventually, settings, fast, content
):
    master = world.child(role="master", config=settings)
    address = master.info["address"]
    engine = world.engine()
    store = world.store(engine, address, lend=MIB)
    guest = world.store(world.engine(), address)
    events = []
    store.on_cleared(lambda: events.append("cleared"))
    guest.put("k", b"before")
    first_segment = store.segment
    master.kill()
    eventually(lambda: _fails_with(errors.MasterUnreachable, store.stats))
    assert (
        seconds(lambda: _fails_with(errors.MasterUnreachable, lambda: store.get("k"))) < fast.call_timeout_s
    )
    assert (
        seconds(lambda: _fails_with(errors.MasterUnreachable, lambda: guest.put("x", b"1")))
        < fast.call_timeout_s
    )
    again = world.child(role="master", config=settings, port=int(address.rpartition(":")[2]))
    assert again.info["address"] == address
    eventually(lambda: not _fails_with(errors.MasterUnreachable, store.stats) and store.stats().clients == 2)
    assert events == ["cleared"]
    assert not store.exist("k")
    assert store.segment is not first_segment
    assert store.stats().capacity_bytes == MIB
    guest.put("k", content(b"k", 1, 300 * KIB))
    assert store.get("k") == content(b"k", 1, 300 * KIB)


def _fails_with(kind, call):
    try:
        call()
    except kind:
        return True
    return False


def test_a_master_that_hangs_does_not_hang_its_clients(world, eventually, settings, fast):
    master = world.child(role="master", config=settings)
    store = world.store(world.engine(), master.info["address"], lend=MIB)
    store.put("k", b"1")
    with stopped_process(master.process.pid):
        took_s = seconds(lambda: _fails_with(errors.MasterUnreachable, lambda: store.get("k")))
        assert took_s < 2 * fast.call_timeout_s
        assert (
            seconds(lambda: _fails_with(errors.MasterUnreachable, lambda: store.get("k")))
            < fast.call_timeout_s
        )
    eventually(lambda: not _fails_with(errors.MasterUnreachable, store.stats))
    store.put("k", b"2", if_exists="replace")
    assert store.get("k") == b"2"


def test_a_client_whose_connection_broke_joins_the_same_master_again(world, eventually, content):
    engine = world.engine()
    master = world.store(engine)
    owner_engine = world.engine()
    owner = world.store(owner_engine, engine.address, lend=MIB)
    master.put("k", b"1")
    cleared = []
    owner.on_cleared(lambda: cleared.append(True))
    owner_engine.connect(engine.address).close()
    eventually(lambda: cleared == [True])
    eventually(lambda: master.stats().capacity_bytes == MIB)
    assert not master.exist("k")
    master.put("k", content(b"k", 1, MIB))
    assert owner.get("k") == content(b"k", 1, MIB)


@DRIVERS
def test_who_knew_a_segment_before_its_owner_joined_again_cannot_write_to_it(
    world, eventually, content, driver
):
    engine = world.engine(driver)
    master = world.store(engine)
    owner_engine = world.engine(driver)
    owner = world.store(owner_engine, engine.address, lend=MIB)
    guest_engine = world.engine(driver)
    guest = world.store(guest_engine, engine.address)
    guest.put("warm", content(b"warm", 1, 100 * KIB))  # the guest has reached the segment already
    request = protocol.Reserve(
        digests=bytes(16), keys=[b"k"], sizes=(MIB // 2).to_bytes(8, "little"), if_exists="keep", avoid=[]
    )
    reserved = guest._member.ask(request, protocol.Reserved)
    owner_engine.connect(engine.address).close()
    eventually(lambda: master.stats().lost == 1 and master.stats().capacity_bytes == MIB)
    master.put("new", content(b"new", 1, MIB))
    layout = Layout(reserved.placement, np.zeros(1, dtype=np.uint64), request.epoch)
    late = guest._mover.write(
        Registered(world.region(guest_engine, b"!" * MIB)), layout, time.monotonic() + 5.0
    )
    assert late.failed == {0}
    assert master.get("new") == owner.get("new") == content(b"new", 1, MIB)


def test_a_wrong_master_address_is_named_within_five_seconds(world, fast):
    engine = world.engine()
    config = msgspec.structs.replace(fast, connect_timeout_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as gone:
        mute_address, gone_address = (f"127.0.0.1:{s.getsockname()[1]}" for s in (mute, gone))
        gone.close()
        for address in (mute_address, gone_address):
            started_s = time.monotonic()
            with pytest.raises(errors.MasterUnreachable, match=address):
                Store(engine, address, lend_bytes=MIB, config=config)
            assert time.monotonic() - started_s < 5.0
    with pytest.raises(errors.ConfigError, match="nonsense"):
        Store(engine, "nonsense")


def test_an_engine_that_is_no_master_refuses_by_name(world):
    stranger = world.engine()
    with pytest.raises(errors.MasterRefused, match=f"{stranger.address}.*no handler"):
        Store(world.engine(), stranger.address, lend_bytes=MIB)


def test_a_master_closed_in_this_process_is_unreachable(world, fast, eventually):
    engine = world.engine()
    master = Master(engine, fast)
    local = world.store(engine, master, lend=MIB)
    remote = world.store(world.engine(), engine.address)
    remote.put("k", b"1")
    master.close()
    for store in (local, remote):
        eventually(lambda store=store: _fails_with(errors.MasterUnreachable, lambda: store.exist("k")))
    with Master(engine, fast):
        eventually(lambda: not _fails_with(errors.MasterUnreachable, lambda: remote.exist("k")))
        assert not remote.exist("k")
        remote.close()
        local.close()


def test_a_store_outlived_by_its_engine_says_so_and_still_closes(world):
    engine, other = world.engine(), world.engine()
    world.store(engine)
    store = world.store(other, engine.address, lend=MIB)
    store.put("k", b"1")
    other.close()
    with pytest.raises((errors.StoreClosed, errors.MasterUnreachable)):
        store.get("k")
    store.close()
