"""What segments hold survives the loss of a master."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_store import Store, StoreConfig, errors, protocol
from mooncake_store.cluster.master import ClusterMaster
from mooncake_store.local_memory import Registered
from mooncake_store.mover import Layout
from mooncake_transfer import TransferEngine

KIB, MIB = 1 << 10, 1 << 20
LONG_S = 30.0
Eventually = Callable[..., Any]
DRIVERS = pytest.mark.parametrize("driver", ["shm", "tcp"])


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'cluster'}"


@pytest.fixture
def settings(fast: StoreConfig) -> StoreConfig:
    return msgspec.structs.replace(fast, leader_ttl_s=5.0, connect_timeout_s=10.0)


def leader_of(masters: list[ClusterMaster]) -> ClusterMaster | None:
    return next((master for master in masters if master.master is not None), None)


def answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except errors.MasterUnreachable:
        return False
    return True


def knows(owner: Store, count: int) -> bool:
    """Whether the owner's ledger has so many values."""
    return len(owner._notices._ledger) == count


@DRIVERS
def test_values_survive_the_loss_of_their_leader(
    world: Any, cluster: str, settings: StoreConfig, eventually: Eventually, content: Any, driver: str
) -> None:
    masters = [world.stack.enter_context(ClusterMaster(world.engine(), cluster, settings)) for _ in range(2)]
    owners = [world.store(world.engine(driver), cluster, lend=4 * MIB, config=settings) for _ in range(2)]
    guest = world.store(world.engine(driver), cluster, config=settings)
    cleared: list[bool] = []
    owners[0].on_cleared(lambda: cleared.append(True))
    values = {f"key-{number}": content(b"k%d" % number, 1, 100 + number * 997) for number in range(60)}
    for key, value in values.items():
        guest.put(key, value)
    guest.remove("key-7")
    del values["key-7"]
    used_bytes = guest.stats().used_bytes
    eventually(lambda: sum(len(owner._notices._ledger) for owner in owners) == 59, LONG_S)
    eventually(lambda: guest.stats().retiring_bytes == 0, LONG_S)
    for round_ in range(2):
        leader = eventually(lambda: leader_of(masters), LONG_S)
        masters.remove(leader)
        leader.close()
        masters.append(world.stack.enter_context(ClusterMaster(world.engine(), cluster, settings)))
        eventually(lambda: answers(guest.stats) and guest.stats().objects == 59, LONG_S)
        assert {key: guest.get(key) for key in values} == values, f"round {round_}"
        assert not guest.exist("key-7")
        assert guest.stats().adopted == 59
    guest.put("key-7", b"new")
    assert owners[1].get("key-7") == b"new"
    assert guest.stats().used_bytes >= used_bytes - 8 * KIB
    assert cleared == []


def test_values_survive_a_master_of_its_own_that_is_killed_and_restarted(
    world: Any, settings: StoreConfig, eventually: Eventually, content: Any
) -> None:
    options = {
        "role": "master",
        "config": msgspec.to_builtins(msgspec.structs.replace(settings, recovery=True)),
    }
    master = world.child(**options)
    address = master.info["address"]
    owner = world.store(world.engine(), address, lend=MIB, config=settings)
    owner.put("k", content(b"k", 1, 300 * KIB))
    eventually(lambda: knows(owner, 1), LONG_S)
    segment = owner.segment
    master.kill()
    world.child(**options, port=int(address.rpartition(":")[2]))
    eventually(lambda: answers(owner.stats) and owner.stats().clients == 1, LONG_S)
    assert owner.get("k") == content(b"k", 1, 300 * KIB)
    assert owner.segment is segment


def test_values_survive_a_broken_connection_between_their_owner_and_its_master(
    world: Any, settings: StoreConfig, eventually: Eventually, content: Any
) -> None:
    config = msgspec.structs.replace(settings, recovery=True)
    engine, owner_engine = world.engine(), world.engine()
    master = world.store(engine, config=config)
    owner = world.store(owner_engine, engine.address, lend=MIB, config=settings)
    master.put("k", content(b"k", 1, MIB))
    eventually(lambda: knows(owner, 1), LONG_S)
    owner_engine.connect(engine.address).close()
    eventually(lambda: master.stats().adopted == 1, LONG_S)
    assert master.get("k") == owner.get("k") == content(b"k", 1, MIB)


@DRIVERS
def test_who_was_given_room_by_an_earlier_leader_cannot_write_there_any_more(
    world: Any, cluster: str, settings: StoreConfig, eventually: Eventually, content: Any, driver: str
) -> None:
    masters = [world.stack.enter_context(ClusterMaster(world.engine(), cluster, settings)) for _ in range(2)]
    owner = world.store(world.engine(driver), cluster, lend=MIB, config=settings)
    guest_engine: TransferEngine = world.engine(driver)
    guest = world.store(guest_engine, cluster, config=settings)
    guest.put("kept", content(b"kept", 1, 100 * KIB))
    eventually(lambda: knows(owner, 1), LONG_S)
    request = protocol.Reserve(
        digests=bytes(16), keys=[b"k"], sizes=(MIB // 2).to_bytes(8, "little"), if_exists="keep", avoid=[]
    )
    reserved = guest._member.ask(request, protocol.Reserved)
    leader = eventually(lambda: leader_of(masters), LONG_S)
    leader.close()
    eventually(lambda: answers(guest.stats) and guest.stats().objects == 1, LONG_S)
    guest.put("new", content(b"new", 1, 800 * KIB))
    layout = Layout(reserved.placement, np.zeros(1, dtype=np.uint64), request.epoch)
    source = Registered(world.region(guest_engine, b"!" * MIB))
    late = guest._mover.write(source, layout, time.monotonic() + LONG_S)
    assert late.failed == {0}
    assert guest.get("new") == content(b"new", 1, 800 * KIB)
    assert owner.get("kept") == content(b"kept", 1, 100 * KIB)
