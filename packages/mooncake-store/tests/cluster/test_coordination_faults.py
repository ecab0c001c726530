"""The service that elects dies, hangs, forgets everything, or loses a member."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from mooncake_store import StoreConfig, errors
from mooncake_store.cluster import open_coordination
from mooncake_store.cluster.candidate import Candidate
from mooncake_store.cluster.master import ClusterMaster
from mooncake_transfer.testing.registry_servers import RegistryServer, etcd_members
from mooncake_transfer.testing.stopping import stopped_process

MIB = 1 << 20
LONG_S = 30.0
Eventually = Callable[..., Any]


@pytest.fixture
def settings(fast: StoreConfig) -> StoreConfig:
    return msgspec.structs.replace(fast, leader_ttl_s=4.0, connect_timeout_s=10.0)


@pytest.fixture
def stand(world: Any, settings: StoreConfig) -> Callable[[str], list[ClusterMaster]]:
    def make(cluster: str) -> list[ClusterMaster]:
        return [world.stack.enter_context(ClusterMaster(world.engine(), cluster, settings)) for _ in range(2)]

    return make


def leader_of(masters: list[ClusterMaster]) -> ClusterMaster | None:
    return next((master for master in masters if master.master is not None), None)


def later_epoch(masters: list[ClusterMaster], epoch: int) -> int:
    """The epoch of the leader, if it is above ``epoch``; else 0."""
    leader = leader_of(masters)
    master = leader.master if leader is not None else None
    return master.epoch if master is not None and master.epoch > epoch else 0


def all_know(masters: list[ClusterMaster], epoch: int) -> bool:
    return all(master._candidate._floor >= epoch for master in masters)


def answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except errors.MasterUnreachable:
        return False
    return True


def test_a_leader_stops_answering_while_its_service_hangs_and_one_leads_again_afterwards(
    server: RegistryServer,
    stand: Callable[[str], list[ClusterMaster]],
    world: Any,
    settings: StoreConfig,
    eventually: Eventually,
) -> None:
    cluster = f"{server.url}/c"
    masters = stand(cluster)
    leader = eventually(lambda: leader_of(masters), LONG_S)
    epoch = leader.master.epoch
    store = world.store(world.engine(), cluster, lend=MIB, config=settings)
    server.pause()
    try:
        eventually(lambda: leader_of(masters) is None, LONG_S)
        eventually(lambda: not answers(store.stats), LONG_S)
    finally:
        server.resume()
    again = eventually(lambda: leader_of(masters), LONG_S)
    assert again.master.epoch > epoch
    eventually(lambda: answers(store.stats), LONG_S)
    store.put("k", b"1", if_exists="replace")
    assert store.get("k") == b"1"


def test_a_service_that_has_forgotten_everything_gives_no_epoch_twice(
    server: RegistryServer, stand: Callable[[str], list[ClusterMaster]], eventually: Eventually
) -> None:
    masters = stand(f"{server.url}/c")
    epochs = [eventually(lambda: leader_of(masters), LONG_S).master.epoch]
    for _ in range(2):
        # Who has never heard of an epoch could not know better; clients would tell it.
        eventually(partial(all_know, masters, epochs[-1]), LONG_S)
        server.kill()
        server.start()
        epochs.append(eventually(partial(later_epoch, masters, epochs[-1]), LONG_S))
    assert epochs == sorted(set(epochs))


@pytest.fixture
def members(tmp_path: Path, require_program: Callable[[str], None]) -> Iterator[list[RegistryServer]]:
    require_program("etcd")
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        started = etcd_members(tmp_path)
        for member in started:
            stack.callback(member.kill)
        list(pool.map(lambda member: member.start(), started))
        yield started


def test_a_cluster_of_etcd_may_lose_any_one_member_killed_or_hanging(
    members: list[RegistryServer],
    stand: Callable[[str], list[ClusterMaster]],
    world: Any,
    settings: StoreConfig,
    eventually: Eventually,
) -> None:
    hosts = ",".join(member.url.partition("://")[2] for member in members)
    cluster = f"etcd://{hosts}/c"
    masters = stand(cluster)
    store = world.store(world.engine(), cluster, lend=MIB, config=settings)
    epoch = eventually(lambda: leader_of(masters), LONG_S).master.epoch
    leading = eventually(lambda: next(filter(leads, members), None), LONG_S)
    leading.pause()
    try:
        # Whoever leads now, it does so for longer than a term, and with the others' consent.
        eventually(lambda: leader_of(masters) and kept_twice(leader_of(masters), eventually), LONG_S)
        eventually(lambda: answers(store.stats), LONG_S)
    finally:
        leading.resume()
    now = eventually(lambda: leader_of(masters), LONG_S).master.epoch
    assert now >= epoch
    members[0].kill()
    eventually(lambda: leader_of(masters) and kept_twice(leader_of(masters), eventually), LONG_S)
    eventually(lambda: answers(lambda: store.put("k", b"1", if_exists="replace")), LONG_S)
    assert store.get("k") == b"1"
    members[0].start(fresh=False)
    members[1].kill()
    eventually(lambda: leader_of(masters) and kept_twice(leader_of(masters), eventually), LONG_S)
    eventually(lambda: answers(store.stats), LONG_S)


def leads(member: RegistryServer) -> bool:
    """Whether this member of etcd leads the others."""
    url = member.url.replace("etcd://", "http://")
    said = httpx.post(f"{url}/v3/maintenance/status", json={}, timeout=20.0, trust_env=False).json()
    return bool(said["leader"] == said["header"]["member_id"])


def kept_twice(master: ClusterMaster | None, eventually: Eventually) -> bool:
    """Whether a master has its term renewed twice from now on."""
    assert master is not None
    candidate = master._candidate
    for _ in range(2):
        term = candidate._term
        if term is None:
            return False
        eventually(partial(over_or_later, candidate, term.until_s), LONG_S)
    return candidate._term is not None


def over_or_later(candidate: Candidate, until_s: float) -> bool:
    term = candidate._term
    return term is None or term.until_s > until_s


def test_a_master_that_was_stopped_for_longer_than_its_term_answers_nobody_when_it_goes_on(
    world: Any, tmp_path: Path, settings: StoreConfig, eventually: Eventually
) -> None:
    cluster = f"sqlite:{tmp_path / 'cluster'}"
    options = {"role": "cluster-master", "cluster": cluster, "config": msgspec.to_builtins(settings)}
    children = {child.info["address"]: child for child in (world.child(**options) for _ in range(2))}
    store = world.store(world.engine(), cluster, lend=MIB, config=settings)
    store.put("k", b"1")
    coordination = open_coordination(cluster, LONG_S)
    world.stack.callback(coordination.close)
    first = coordination.leader()
    assert first is not None
    stopped = children[first.address].process
    direct = world.engine().connect(first.address)  # a client that is late to notice
    with stopped_process(stopped.pid):
        second = eventually(
            lambda: (now := coordination.leader()) and now.epoch > first.epoch and now, LONG_S
        )
        assert second.address != first.address
        eventually(lambda: answers(store.stats), LONG_S)
        store.put("k", b"2", if_exists="replace")
    with pytest.raises(Exception, match="MasterNotLeading"):
        direct.call("store.v1", msgspec.msgpack.encode(["Mount", 5, 0, b""]), timeout_s=LONG_S)
    assert store.get("k") == b"2"
    assert coordination.leader() == second
