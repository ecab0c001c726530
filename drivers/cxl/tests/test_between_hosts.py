"""Two host numbers on one machine: shares, flushes, beats. To the driver they are two machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_driver_cxl import Pool
from mooncake_transfer import Region, TransferConfig, TransferEngine
from mooncake_transfer.errors import NoRoute, PeerUnreachable, RegionBusy, RegionRefused
from mooncake_transfer.testing import PeerProcess, PeerProcessError
from mooncake_transfer.testing.fixtures import wait_until

MIB = 1 << 20
POOL_BYTES = 128 * MIB
LEASE_S = 3.0
DEADLINE_S = 20.0


def config(path: Path, host: int, **options: Any) -> TransferConfig:
    found = {"path": str(path), "host": host, "lease_s": LEASE_S, **options}
    return TransferConfig(drivers=("cxl",), driver_options={"cxl": found}, allocate_from="cxl")


@pytest.fixture
def shared(pool_path: Path) -> Path:
    with pool_path.open("wb") as file:
        file.truncate(POOL_BYTES)
    Pool.format(str(pool_path), hosts=2)
    return pool_path


@pytest.fixture
def engine(shared: Path) -> Iterator[TransferEngine]:
    with TransferEngine(config(shared, 0)) as engine:
        yield engine


@pytest.fixture
def peer(shared: Path) -> Iterator[PeerProcess]:
    with PeerProcess(config(shared, 1)) as peer:
        yield peer


def filled(engine: TransferEngine, value: int, nbytes: int = 4 * MIB) -> Region:
    region = engine.allocate(nbytes)
    np.frombuffer(region.view(), np.uint8)[:] = value
    return region


def test_bytes_move_both_ways_and_keys_are_checked(engine: TransferEngine, peer: PeerProcess) -> None:
    owned = peer.allocate(4 * MIB, 2)
    remote, local = engine.import_region(owned.descriptor), filled(engine, 5)
    before = peer.digest(owned.number)
    engine.read(local, remote, [[0, 0, 4 * MIB]]).wait(DEADLINE_S)
    np.frombuffer(local.view(), np.uint8)[:] = 6
    engine.write(local, remote, [[0, 0, 4 * MIB]]).wait(DEADLINE_S)
    assert peer.digest(owned.number) != before
    reading = engine.import_region(peer.grant(owned.number, "r"))
    engine.read(local, reading, [[0, 0, 64]]).wait(DEADLINE_S)
    with pytest.raises(RegionRefused, match="only reading"):
        engine.write(local, reading, [[0, 0, 64]]).wait(DEADLINE_S)
    peer.close_region(owned.number, DEADLINE_S)
    with pytest.raises(RegionRefused, match="deregistered"):
        engine.read(local, remote, [[0, 0, 64]]).wait(DEADLINE_S)


def test_a_host_that_falls_silent_is_unreachable_after_its_lease(
    engine: TransferEngine, peer: PeerProcess
) -> None:
    remote, local = engine.import_region(peer.allocate(MIB, 2).descriptor), filled(engine, 5, MIB)
    engine.read(local, remote, [[0, 0, MIB]]).wait(DEADLINE_S)
    peer.kill()  # no kernel tells this side: it is another machine, to the driver
    blocks = np.tile(np.array([[0, 0, MIB]], np.uint64), (1 << 20, 1))  # more than fits into the deadline
    with pytest.raises(PeerUnreachable, match="not been heard of for lease_s"):
        engine.read(local, remote, blocks).wait(DEADLINE_S)


@pytest.mark.parametrize("host", [0, 1], ids=["its own host", "another host"])
def test_a_region_is_given_back_although_its_writer_was_stopped_in_mid_copy(shared: Path, host: int) -> None:
    """One of this host is waited for; one of another host counts as gone after its lease."""
    with TransferEngine(config(shared, 0)) as owner, PeerProcess(config(shared, host)) as copier:
        region = owner.allocate(MIB)
        source = copier.allocate(MIB, 3)
        copier.begin_write(source.number, region.descriptor(), [[0, 0, MIB]] * 20_000, DEADLINE_S)
        view = np.frombuffer(region.view(), np.uint8)
        deadline = time.monotonic() + DEADLINE_S
        while not view.any():
            assert time.monotonic() < deadline
        copier.pause()
        if host == 1:
            region.close(DEADLINE_S)
            copier.kill()
        else:  # Whether the signal caught it inside a copy, so that the call gives up, is left to chance.
            with contextlib.suppress(RegionBusy):
                region.close(0.1)
            copier.resume()
            region.close(DEADLINE_S)
        view[:] = 9
        copier.kill()
        assert set(view.tolist()) == {9}
        del view, region


def test_the_process_that_still_copies_is_named(shared: Path) -> None:
    with TransferEngine(config(shared, 0)) as owner, PeerProcess(config(shared, 0)) as copier:
        source = copier.allocate(MIB, 3)
        said: list[str] = []

        def caught_inside_a_copy() -> bool:
            """Nearly always: whether the signal comes between two copies is left to chance."""
            region = owner.allocate(MIB)
            copier.begin_write(source.number, region.descriptor(), [[0, 0, MIB]] * 20_000, DEADLINE_S)
            with memoryview(region.view()) as view:
                wait_until(lambda: any(view[:64]), "the first bytes arrive")
            copier.pause()
            try:
                region.close(0.1)
            except RegionBusy as error:
                said.append(str(error))
            copier.resume()
            region.close(DEADLINE_S)
            with pytest.raises(PeerProcessError):
                copier.answer()
            return said != []

        wait_until(caught_inside_a_copy, "a copier is stopped inside a copy")
        assert f"process {copier.pid} still copied from or to the memory" in said[0]


def test_memory_outside_the_pool_is_left_to_other_drivers(shared: Path) -> None:
    with TransferEngine(config(shared, 0)) as owner, TransferEngine(config(shared, 0)) as reader:
        outside = owner.allocate(MIB, driver="")
        local = reader.allocate(MIB)
        with pytest.raises(NoRoute, match="does not lie in the pool"):
            reader.read(local, reader.import_region(outside.descriptor()), [[0, 0, MIB]]).wait(DEADLINE_S)


def test_engines_with_different_pools_do_not_meet(shared: Path, pool_folder: Path) -> None:
    other = pool_folder / "other"
    options = {"path": str(other), "create": True, "size_bytes": POOL_BYTES}
    found = TransferConfig(drivers=("cxl",), driver_options={"cxl": options}, allocate_from="cxl")
    with TransferEngine(config(shared, 0)) as owner, TransferEngine(found) as reader:
        source, local = owner.allocate(MIB), reader.allocate(MIB)
        with pytest.raises((NoRoute, PeerUnreachable), match="has another pool"):
            reader.read(local, reader.import_region(source.descriptor()), [[0, 0, MIB]]).wait(DEADLINE_S)
    other.unlink()
