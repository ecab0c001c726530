"""Several masters, of which one leads; clients find it and follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_store import Store, StoreConfig, errors
from mooncake_store.cluster import Coordination, Leader, Term
from mooncake_store.cluster.candidate import Candidate
from mooncake_store.cluster.contract import lease_clock_s
from mooncake_store.cluster.master import ClusterMaster

MIB = 1 << 20
TTL_S = 10.0  # leaders that end resign, so that nobody waits for it
Eventually = Callable[..., Any]


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'cluster'}"


@pytest.fixture
def settings(fast: StoreConfig) -> StoreConfig:
    return msgspec.structs.replace(fast, leader_ttl_s=TTL_S, connect_timeout_s=5.0)


@pytest.fixture
def masters(world: Any, cluster: str, settings: StoreConfig) -> list[ClusterMaster]:
    return [world.stack.enter_context(ClusterMaster(world.engine(), cluster, settings)) for _ in range(3)]


def leader_of(masters: list[ClusterMaster]) -> ClusterMaster | None:
    return next((master for master in masters if master.master is not None), None)


def test_one_master_leads_and_the_others_name_it(
    masters: list[ClusterMaster], world: Any, fast: StoreConfig, eventually: Eventually
) -> None:
    leader = eventually(lambda: leader_of(masters))
    assert [master for master in masters if master.master is not None] == [leader]
    assert masters[0].leader() == Leader(leader.address, leader.master.epoch)
    for other in masters:
        if other is not leader:
            with pytest.raises(errors.MasterNotLeading, match=leader.address):
                Store(world.engine(), other.address, config=fast)
            with pytest.raises(errors.MasterNotLeading, match=leader.address):
                other.stats()


def test_clients_follow_the_leadership_by_themselves(
    masters: list[ClusterMaster], world: Any, cluster: str, settings: StoreConfig, eventually: Eventually
) -> None:
    owner = world.store(world.engine(), cluster, lend=MIB, config=settings)
    guest = world.store(world.engine(), cluster, config=settings)
    epochs = []
    for _ in range(2):
        leader = eventually(lambda: leader_of(masters))
        eventually(lambda: _answers(guest.stats) and guest.stats().clients == 2)
        epochs.append(leader.master.epoch)
        guest.put("k", b"value", if_exists="replace")
        assert owner.get("k") == b"value"
        masters.remove(leader)
        leader.close()
    assert epochs[0] < epochs[1]


def test_a_cluster_without_a_leader_is_named_within_the_deadline(
    world: Any, cluster: str, settings: StoreConfig
) -> None:
    started_s = time.monotonic()
    with pytest.raises(errors.MasterUnreachable, match=f"no master leads.*{cluster}"):
        Store(world.engine(), cluster, config=msgspec.structs.replace(settings, connect_timeout_s=0.5))
    assert time.monotonic() - started_s < 10.0


def test_a_cluster_at_nobody_s_address_is_named_within_the_deadline(
    world: Any, settings: StoreConfig
) -> None:
    for url in ("etcd://127.0.0.1:1,127.0.0.1:2/c", "redis://127.0.0.1:1/c"):
        with pytest.raises(errors.CoordinationUnavailable, match=url):
            Store(world.engine(), url, config=msgspec.structs.replace(settings, connect_timeout_s=0.5))
    with pytest.raises(errors.ConfigError, match="consul"):
        Store(world.engine(), "consul://127.0.0.1/c", config=settings)


def test_a_client_does_not_go_back_to_a_master_of_an_earlier_epoch(
    world: Any, cluster: str, settings: StoreConfig, eventually: Eventually
) -> None:
    engine = world.engine()
    standing = ClusterMaster(engine, cluster, settings)
    first = standing.wait_to_lead(20).epoch
    store = world.store(world.engine(), cluster, config=settings)
    store._member._epoch = first + 5  # as if it had been with a later one, which the service forgot
    store._member._lose(store._member._link, "for the test")
    # The master learns of it from the client, and is elected anew, above.
    again = eventually(lambda: standing.master and standing.master.epoch > first + 5 and standing.master, 20)
    eventually(lambda: _answers(store.stats))
    assert store._member._epoch == again.epoch
    standing.close()


class OneVoter:
    """A coordination without time: it gives terms and keeps them as it is told."""

    where = "one-voter"

    def __init__(self) -> None:
        self.epoch, self.ttl_s, self.answers = 0, 60.0, True
        self.resigned: list[int] = []

    def campaign(self, address: str, ttl_s: float, floor: int) -> Term | None:
        self._answer()
        self.epoch = max(self.epoch, floor) + 1
        return Term(Leader(address, self.epoch), lease_clock_s() + self.ttl_s, "")

    def keep(self, term: Term, ttl_s: float) -> Term | None:
        self._answer()
        return Term(term.leader, lease_clock_s() + self.ttl_s, "")

    def resign(self, term: Term) -> None:
        self.resigned.append(term.leader.epoch)

    def leader(self) -> Leader | None:
        return None

    def close(self) -> None:
        pass

    def _answer(self) -> None:
        if not self.answers:
            raise errors.CoordinationUnavailable("it does not answer")


def test_a_candidate_whose_service_is_silent_is_out_of_office_when_its_term_ends(
    eventually: Eventually,
) -> None:
    voter: Coordination = OneVoter()
    assert isinstance(voter, OneVoter)
    events: list[object] = []
    candidate = Candidate(voter, "a:1", 0.4, events.append, events.append)
    with ExitStack() as stack:
        stack.callback(candidate.stop)
        candidate.start()
        eventually(lambda: events == [1])
        assert candidate.in_office(1)
        assert not candidate.in_office(2)
        voter.ttl_s = 3.0
        eventually(lambda: candidate._term is not None and candidate._term.until_s < lease_clock_s() + 4)
        voter.answers = False
        eventually(lambda: not candidate.in_office(1))
        eventually(lambda: len(events) == 2)
        assert "does not answer" in str(events[1])
        voter.ttl_s, voter.answers = 60.0, True
        eventually(lambda: events[2:] == [2])
        candidate.step_down(7)
        assert not candidate.in_office(2)
        eventually(lambda: events[3:] and events[-1] == 8)
    assert voter.resigned == [1, 2, 8]


def _answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except errors.MasterUnreachable:
        return False
    return True
