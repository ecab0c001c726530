"""Writers that are stopped in the middle of a write, and go on when their room is another value's."""

import itertools
import os
import signal
import time

import msgspec
import numpy as np
import pytest

from mooncake_store import PutPolicy, errors, protocol
from mooncake_store.batch import Batch
from mooncake_transfer.errors import RegionRefused
from mooncake_transfer.testing.stopping import stop_process

MIB = 1 << 20
VALUE, LENT = 96 * MIB, 128 * MIB
PINNED = PutPolicy(hard_pin=True)  # nothing that the late writer does later may take its room
LONG_S = 120.0


@pytest.fixture
def settings(fast):
    """Reservations that expire soon, and nobody who is taken for dead."""
    return msgspec.structs.replace(fast, reservation_ttl_s=2.0, lease_ttl_s=2.0, client_ttl_s=300.0)


def stop_in_mid_write(writer, owner):
    """Have the writer put a value, and stop it when some of the bytes have arrived, and not all; the key."""
    memory = np.frombuffer(owner.segment.view(), dtype=np.uint8)
    end_s = time.monotonic() + LONG_S
    for number in itertools.count():
        assert time.monotonic() < end_s, f"the writer was not stopped in the middle of {number} writes"
        memory[:] = 0
        writer.tell(do="put_ones", key=f"late-{number}", nbytes=VALUE)
        until_s = time.monotonic() + LONG_S
        while not memory[0] and not memory[LENT - VALUE] and time.monotonic() < until_s:
            time.sleep(1e-4)
        stop_process(writer.process.pid)
        arrived = np.count_nonzero(memory[::4096])
        if 0 < arrived < VALUE // 4096 and not owner.exist(f"late-{number}"):
            return f"late-{number}"
        os.kill(writer.process.pid, signal.SIGCONT)  # it was too quick
        writer.answer()
        owner.remove(f"late-{number}")


def put_when_there_is_room(store, key, value):
    try:
        store.put(key, value, policy=PINNED)
    except errors.StoreFull:
        return False
    return True


@pytest.mark.parametrize("driver", ["shm", "tcp"])
def test_nothing_of_a_writer_that_was_stopped_lands_on_the_value_that_has_its_room(
    world, settings, eventually, driver
):
    owner = world.store(lend=LENT, config=settings, drivers=(driver,))
    config = msgspec.to_builtins(settings)
    writer = world.child(master=owner.engine.address, drivers=[driver], config=config)
    late = stop_in_mid_write(writer, owner)
    other = bytes(VALUE)  # zeros, where the late writer has ones
    try:
        eventually(lambda: owner.stats().reservations == 0, LONG_S)
        # Over shm it may be inside of a copy, and is then waited for; over tcp nothing has to be.
        if driver == "tcp":
            eventually(lambda: put_when_there_is_room(owner, "other", other), LONG_S)
        else:
            put_when_there_is_room(owner, "other", other)
    finally:
        os.kill(writer.process.pid, signal.SIGCONT)
    if writer.answer()["result"] == "put":  # it tried again, and was first
        owner.remove(late)
    eventually(lambda: owner.exist("other") or put_when_there_is_room(owner, "other", other), LONG_S)
    assert owner.get("other") == other


def test_who_reads_and_writes_for_longer_goes_on_while_the_keys_change(world, settings, eventually):
    # A busy machine must not make the session itself late.
    settings = msgspec.structs.replace(settings, reservation_ttl_s=8.0)
    owner = world.store(lend=4 * MIB, config=settings)
    engine = world.engine()
    guest = world.store(engine, owner.engine.address, config=settings)
    region = world.region(engine, b"x" * 4096)
    owner.put("there", b"y" * 4096)
    before = owner._segment.descriptor()
    with guest.read_session(["there"]) as reading, guest.write_session(["new"], [8192]) as writing:
        reading.read_parts(region, [[0, 0, 0, 1]])
        writing.write_parts(region, [[0, 0, 0, 4096]])
        expire_a_reservation(owner)

        def changed():
            # As they do that live: a session that writes nothing for longer than its reservation is over.
            writing.write_parts(region, [[0, 4096, 0, 1]])
            return owner._segment.descriptor() != before and not owner._segment._older

        eventually(changed, LONG_S)
        with pytest.raises(RegionRefused):
            engine.read(region, engine.import_region(before), [[0, 0, 4096]]).wait(10.0)
        region.view()[:] = b"z" * 4096
        writing.write_parts(region, [[0, 4096, 0, 4096]])
        reading.read_parts(region, [[0, 0, 0, 4096]])
        assert bytes(region.view()) == b"y" * 4096
        eventually(lambda: len(owner.master._state.context.fences) == 0, LONG_S)
    assert reading.good.tolist() == [True]
    assert writing.stored.tolist() == [True]
    assert owner.get("new")[4096:] == b"z" * 4096


def expire_a_reservation(store):
    """Reserve room, and never say what became of it."""
    batch = Batch("", [b"never"])
    request = protocol.Reserve(
        digests=batch.digests.tobytes(),
        keys=batch.keys,
        sizes=np.array([4096], dtype="<u8").tobytes(),
        if_exists="error",
        avoid=[],
    )
    assert store._member.ask(request, protocol.Reserved).reservation
