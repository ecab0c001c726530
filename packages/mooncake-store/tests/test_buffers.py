"""Buffers of values: the store's own memory where it is on this host, under a lease; else a copy."""

import asyncio
import gc
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mooncake_store import AsyncStore, Master, PutPolicy, StoreConfig, errors
from mooncake_store.testing.processes import StoreProcess
from mooncake_transfer import RemoteRegion
from mooncake_transfer.errors import NoRoute

KIB, MIB = 1 << 10, 1 << 20
OTHER_PROCESS = """
import sys
from mooncake_store import Store
from mooncake_transfer import TransferEngine
sys.path.insert(0, sys.argv[3])
from test_buffers import inode_of
with TransferEngine() as engine, Store(engine, sys.argv[1]) as store, store.get_buffer(sys.argv[2]) as buffer:
    print(inode_of(buffer), buffer.shared, bytes(buffer[:5]).decode(), flush=True)
"""


def inode_of(buffer):
    """The file that the buffer's bytes are mapped from, and where in it, as the kernel says."""
    address = buffer.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, offset, _, inode, *_ = line.split()
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return f"{inode}:{int(offset, 16) + address - start}"
    raise AssertionError(f"nothing is mapped at {address:x}")


def pair(world, fast, lend=MIB):
    engine = world.engine()
    owner = world.store(engine, lend=lend, config=fast)
    return owner, world.store(world.engine(), engine.address, config=fast)


def no_leases(store):
    return store.stats().leases == 0


def test_a_buffer_is_the_value_and_cannot_be_written_to(world, fast):
    owner, guest = pair(world, fast)
    guest.put("k", b"hello")
    for store in (owner, guest):
        with store.get_buffer("k") as buffer:
            assert buffer.shared
            assert buffer.valid
            assert bytes(buffer) == bytes(memoryview(buffer)) == b"hello"
            assert memoryview(buffer).readonly
            with pytest.raises(ValueError, match="read-only"):
                buffer[0] = 1
        assert not buffer.valid
        buffer.close()


def test_a_missing_key_is_told_and_an_empty_value_is_none(world, fast):
    _, guest = pair(world, fast)
    with pytest.raises(errors.KeyNotFound):
        guest.get_buffer("k")
    guest.put("k", b"")
    with guest.get_buffer("k") as buffer:
        assert bytes(buffer) == b""


def test_of_a_batch_each_has_its_buffer_under_one_lease(world, fast, eventually):
    owner, guest = pair(world, fast)
    guest.put("a", b"1" * 5000)
    guest.put("c", b"3")
    first, missing, last = guest.batch_get_buffer(["a", "b", "c"])
    assert missing is None
    assert owner.stats().leases == 1
    first.close()
    assert owner.stats().leases == 1
    assert (bytes(last), last.valid) == (b"3", True)
    last.close()
    eventually(lambda: no_leases(owner))
    assert guest.numbers().hits == 2


def test_a_value_stays_as_long_as_its_buffer_is_held(world, fast, eventually):
    owner, guest = pair(world, fast)
    guest.put("k", b"x" * 600 * KIB)
    buffer = guest.get_buffer("k")
    with pytest.raises(errors.StoreFull):
        guest.put("other", bytes(600 * KIB))
    guest.put("k", b"y" * 100 * KIB, if_exists="replace")
    assert guest.get("k")[:1] == b"y"
    assert bytes(buffer) == b"x" * 600 * KIB
    buffer.close()
    eventually(lambda: no_leases(owner))
    guest.put("other", bytes(600 * KIB))


def test_a_lease_is_renewed_for_as_long_as_it_takes(world, fast, eventually):
    owner, guest = pair(world, fast)
    guest.put("k", b"1")
    with guest.get_buffer("k") as buffer:
        (lease,) = guest._member._leases
        first_s = guest._member._leases[lease]
        eventually(lambda: guest._member._leases[lease] > first_s + 1.2 * fast.lease_ttl_s)
        assert buffer.valid
        assert owner.stats().leases == 1


def test_the_last_view_that_goes_ends_the_lease(world, fast, eventually):
    owner, guest = pair(world, fast)
    guest.put("k", b"hello" * 1000)
    part = memoryview(np.asarray(guest.get_buffer("k"))[5:10])
    gc.collect()
    assert owner.stats().leases == 1
    assert bytes(part) == b"hello"
    del part
    gc.collect()
    eventually(lambda: no_leases(owner))


def test_what_is_made_from_a_buffer_cannot_be_closed(world, fast):
    _, guest = pair(world, fast)
    guest.put("k", b"hello")
    with guest.get_buffer("k") as buffer, pytest.raises(errors.ValueInvalid, match="is none itself"):
        buffer[1:].close()


def test_after_the_loss_of_the_master_a_buffer_is_void_and_says_so(world, fast, eventually):
    engine = world.engine()
    with Master(engine, fast):
        guest = world.store(world.engine(), engine.address, lend=MIB)
        guest.put("k", b"hello")
        buffer = guest.get_buffer("k")
    eventually(lambda: not buffer.valid)
    with pytest.raises((errors.LeaseExpired, errors.MasterUnreachable)):
        buffer.close()


def test_the_bytes_stay_when_their_owner_is_killed(world, fast):
    engine = world.engine()
    world.stack.enter_context(Master(engine, fast))
    owner = world.child(role="client", master=engine.address, lend=MIB, config=msgspec.to_builtins(fast))
    guest = world.store(engine, engine.address)
    guest.put("k", b"hello")
    buffer = guest.get_buffer("k")
    assert buffer.shared
    owner.kill()
    assert bytes(buffer) == b"hello"


def test_what_cannot_be_mapped_is_copied_and_stays_right(world, fast, eventually, monkeypatch):
    def refuse(self):
        raise NoRoute("this is another host")

    monkeypatch.setattr(RemoteRegion, "map", refuse)
    owner, guest = pair(world, fast)
    guest.put("k", b"hello")
    buffer = guest.get_buffer("k")
    assert (buffer.shared, buffer.valid, bytes(buffer)) == (False, True, b"hello")
    eventually(lambda: no_leases(owner))
    buffer.close()
    assert guest.numbers().hits == 1


def test_processes_of_one_host_see_the_pages_of_one_node(world, fast):
    with StoreProcess("master", "--host", "127.0.0.1") as master:  # noqa: SIM117
        with StoreProcess("node", "--master", master.address, "--lend", "8M"):
            guest = world.store(world.engine(), master.address, config=fast)
            guest.put("k", b"hello" * 1000)
            with guest.get_buffer("k") as buffer:
                assert buffer.shared
                command = [
                    sys.executable,
                    "-c",
                    OTHER_PROCESS,
                    master.address,
                    "k",
                    str(Path(__file__).parent),
                ]
                said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
                assert said.split() == [inode_of(buffer), "True", "hello"]


def lose_owner_and_come_back(owner, eventually):
    """It joins the same master again, with the memory that it had."""
    member = owner._member
    member._lose(member._link, "the connection broke")
    eventually(lambda: member._link is not None)


@pytest.fixture
def recovering(world, fast):
    """An owner that keeps its memory when it joins again, and a guest that hears of it only when it asks."""
    config = msgspec.structs.replace(fast, recovery=True, lease_ttl_s=60.0, heartbeat_s=60.0)
    engine = world.engine()
    world.stack.enter_context(Master(engine, config))
    owner = world.store(world.engine(), engine.address, lend=MIB, config=config)
    return owner, world.store(world.engine(), engine.address, config=config)


def test_of_an_owner_that_joined_again_a_buffer_may_show_another_value_and_says_so(recovering, eventually):
    owner, guest = recovering
    guest.put("k", b"1" * 600 * KIB)
    owner._member.catch_up()  # so that it knows what it keeps
    buffer = guest.get_buffer("k")
    lose_owner_and_come_back(owner, eventually)
    guest.remove("k")
    guest.put("new", b"2" * 600 * KIB)
    assert bytes(buffer[:1]) == b"2"
    guest._member.catch_up()
    assert not buffer.valid
    with pytest.raises(errors.LeaseExpired, match="owner of the memory"):
        buffer.close()


def test_a_replica_that_stayed_elsewhere_does_not_hide_that_the_mapped_one_was_lost(
    world, recovering, eventually
):
    owner, guest = recovering
    world.store(
        world.engine(), guest._member._link._peer.address, lend=MIB, config=StoreConfig(recovery=True)
    )
    guest.put("k", b"1" * 600 * KIB, policy=PutPolicy(replicas=2))
    owner._member.catch_up()
    buffer = guest.get_buffer("k")
    lose_owner_and_come_back(owner, eventually)
    with pytest.raises(errors.LeaseExpired, match="owner of the memory"):
        buffer.close()
    assert guest.get("k") == b"1" * 600 * KIB


def test_buffers_of_a_batch_say_so_too_whichever_is_closed_first(recovering, eventually):
    owner, guest = recovering
    guest.put("a", b"1")
    guest.put("b", b"2")
    owner._member.catch_up()
    buffers = guest.batch_get_buffer(["a", "b"])
    lose_owner_and_come_back(owner, eventually)
    for buffer in buffers:
        with pytest.raises(errors.LeaseExpired):
            buffer.close()


def test_buffers_of_a_batch_are_closed_in_any_order_and_at_once(recovering, eventually):
    owner, guest = recovering
    keys = [f"{number}" for number in range(8)]
    for key in keys:
        guest.put(key, b"1")
    failures = []

    def close(buffer):
        try:
            buffer.close()
        except errors.StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=close, args=(buffer,)) for buffer in guest.batch_get_buffer(keys)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert failures == []
    assert no_leases(owner)


def test_a_buffer_may_be_collected_while_this_thread_counts_or_closes(world, fast):
    _, guest = pair(world, fast)
    guest.put("k", b"hello")
    held = [guest.get_buffer("k"), guest.get_buffer("k")]
    for lock in (guest._counters._lock, held[0]._memory.lease._lock):
        with lock:
            assert lock.acquire(blocking=False)  # else what follows would wait for ever
            lock.release()
            held.pop()
    assert guest.numbers().hits == 2


async def _awaited(engine, address, config):
    async with (
        await AsyncStore.open(engine, address, config=config) as store,
        await store.get_buffer("k") as buffer,
    ):
        return bytes(buffer)


def test_buffers_are_awaited_too(world, fast):
    owner, guest = pair(world, fast)
    guest.put("k", b"hello")
    assert asyncio.run(_awaited(world.engine(), owner.engine.address, fast)) == b"hello"
