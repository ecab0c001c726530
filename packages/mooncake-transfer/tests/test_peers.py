"""Peers come and go: one for each address, none that is gone, and regions that outlive the connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from mooncake_transfer import Peer, Region, TransferConfig, TransferEngine
from mooncake_transfer.testing.fixtures import wait_until

NBYTES = 4096
DEADLINE_S = 20.0
ALL = [[0, 0, NBYTES]]
TCP = TransferConfig(drivers=("tcp",))


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TCP) as engine:
        yield engine


@pytest.fixture
def owned() -> Iterator[Region]:
    with TransferEngine(TCP) as owner:
        region = owner.allocate(NBYTES)
        region.view()[:] = b"o" * NBYTES
        yield region


def held() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def check_read(engine: TransferEngine, descriptor: bytes) -> Peer:
    with engine.allocate(NBYTES) as local:
        remote = engine.import_region(descriptor)
        engine.read(local, remote, ALL).wait(DEADLINE_S)
        assert bytes(local.view()) == b"o" * NBYTES
        remote.close()
        return remote.peer


def test_many_peers_that_were_closed_hold_no_connection_and_no_rail(engine: TransferEngine) -> None:
    with ExitStack() as stack:
        owners = [stack.enter_context(TransferEngine(TCP)) for _ in range(60)]
        regions = [owner.allocate(NBYTES) for owner in owners]
        for region in regions:
            region.view()[:] = b"o" * NBYTES
        before = held()
        peers = [check_read(engine, region.descriptor()) for region in regions]
        assert len({rail.peer for rail in engine.rails()}) == len(owners)
        for peer in peers:
            peer.close()
            peer.close()
        wait_until(lambda: held() <= before, "the connections of both sides have ended")
        assert engine.rails() == []


def test_many_peers_that_died_are_forgotten(engine: TransferEngine) -> None:
    for _ in range(10):
        with TransferEngine(TCP) as owner:
            region = owner.allocate(NBYTES)
            region.view()[:] = b"o" * NBYTES
            peer = check_read(engine, region.descriptor())
        wait_until(lambda peer=peer: not peer.alive, "it is known to be gone")  # type: ignore[misc]
    assert engine.rails() == []


def test_peers_that_died_are_forgotten_when_another_one_is_reached(
    engine: TransferEngine, owned: Region
) -> None:
    for _ in range(10):
        with TransferEngine(TCP) as other:
            peer = engine.connect(other.address)
        wait_until(lambda peer=peer: not peer.alive, "it is known to be gone")  # type: ignore[misc]
    peer = check_read(engine, owned.descriptor())
    assert set(engine._peers._by_address) == {peer.address}
    assert not engine._peers._connecting


def test_a_region_is_read_after_its_peer_was_closed_and_its_rails_are_told(
    engine: TransferEngine, owned: Region
) -> None:
    local, remote = engine.allocate(NBYTES), engine.import_region(owned.descriptor())
    remote.peer.close()
    wait_until(lambda: not remote.peer.alive, "the connection has ended")
    assert [rail.peer for rail in engine.rails()] == [remote.peer.address]
    engine.read(local, remote, ALL).wait(DEADLINE_S)
    assert bytes(local.view()) == b"o" * NBYTES
    remote.close()
    assert engine.rails() == []


def test_closing_a_peer_again_spares_its_successor_at_the_same_address(
    engine: TransferEngine, owned: Region
) -> None:
    first = check_read(engine, owned.descriptor())
    first.close()
    wait_until(lambda: not first.alive, "the connection has ended")
    second = check_read(engine, owned.descriptor())
    assert second is not first
    first.close()
    assert engine.connect(first.address) is second
    assert second.alive
    assert second.epoch == first.epoch
    assert [rail.peer for rail in engine.rails()] == [second.address]


def test_threads_that_connect_to_one_address_share_a_peer(engine: TransferEngine, owned: Region) -> None:
    address = owned._engine.address
    together = threading.Barrier(8)

    def connect() -> Peer:
        together.wait(DEADLINE_S)
        return engine.connect(address)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            peers = [each.result(DEADLINE_S) for each in [threads.submit(connect) for _ in range(8)]]
            assert len({id(peer) for peer in peers}) == 1
            peers[0].close()
            wait_until(lambda peer=peers[0]: not peer.alive, "the connection has ended")  # type: ignore[misc]
