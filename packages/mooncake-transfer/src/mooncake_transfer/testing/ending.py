"""The part of the driver suite in which things end early: regions, transfers, peers, engines."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake_transfer import Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import (
    EngineClosed,
    PeerUnreachable,
    RegionRefused,
    TransferCancelled,
    TransferTimeout,
)
from mooncake_transfer.testing.fixtures import DEADLINE_S, DriverFixtures, wait_until
from mooncake_transfer.testing.owner import Target
from mooncake_transfer.testing.pattern import digest, pattern
from mooncake_transfer.testing.peer_process import PeerProcess

__all__ = ["Ends"]

NBYTES = 4 << 20
# One transfer of 64 GiB between two regions of 4 MiB: no driver is through before the test has acted.
ENDLESS_BLOCKS = 1 << 14
LOCAL_SEED, REMOTE_SEED, LAST_SEED = 1, 2, 9
# How late the end of a peer may show. Drivers that learn it from a timer must not need longer.
PEER_LOSS_S = 15.0

both_ways = pytest.mark.parametrize("way", ["read", "write"])


class Ends(DriverFixtures):
    """However something ends, the rest goes on, every wait is over in time, and memory is left alone."""

    def endless(
        self, engine: TransferEngine, way: str, remote: RemoteRegion, local: Region | None = None
    ) -> Transfer:
        """A transfer that runs, and would run for a long time yet."""
        local = local or self.local(engine, NBYTES, LOCAL_SEED)[0]
        blocks = np.tile(np.array([[0, 0, NBYTES]], np.uint64), (ENDLESS_BLOCKS, 1))
        transfer = (engine.read if way == "read" else engine.write)(local, remote, blocks)
        wait_until(lambda: transfer.bytes_done > 0 or transfer.done(), "the transfer moves bytes")
        assert not transfer.done()
        return transfer

    def check_works(self, engine: TransferEngine, target: Target) -> None:
        """Both engines still move bytes, in both directions."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        engine.read(local, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert np.array_equal(memory, pattern(REMOTE_SEED, NBYTES))
        memory[:] = pattern(LAST_SEED, NBYTES)
        engine.write(local, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert target.digest(owned.number) == digest(pattern(LAST_SEED, NBYTES))

    @both_ways
    def test_a_region_closes_while_peers_use_it(
        self, engine: TransferEngine, target: Target, way: str
    ) -> None:
        """They are refused from then on, and its memory is not touched again."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        transfer = self.endless(engine, way, engine.import_region(owned.descriptor))
        target.close_region(owned.number, DEADLINE_S)
        target.fill(owned.number, LAST_SEED)
        with pytest.raises(RegionRefused):
            transfer.wait(DEADLINE_S)
        assert target.digest(owned.number) == digest(pattern(LAST_SEED, NBYTES))
        self.check_works(engine, target)

    def test_regions_come_and_go_under_load(self, engine: TransferEngine, target: Target) -> None:
        """Registering, reading and closing others while transfers run between the same engines."""
        steady = engine.import_region(target.allocate(NBYTES, REMOTE_SEED).descriptor)
        place, received = self.local(engine, NBYTES, LOCAL_SEED)
        over = threading.Event()

        def keep_reading() -> int:
            count = 0
            while not over.is_set():
                engine.read(place, steady, [[0, 0, NBYTES]]).wait(DEADLINE_S)
                count += 1
            return count

        nbytes = 64 << 10
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(keep_reading)
            try:
                for seed in range(100, 120):
                    owned = target.allocate(nbytes, seed)
                    local, memory = self.local(engine, nbytes, LOCAL_SEED)
                    engine.read(local, engine.import_region(owned.descriptor), [[0, 0, nbytes]]).wait(
                        DEADLINE_S
                    )
                    assert np.array_equal(memory, pattern(seed, nbytes))
                    target.close_region(owned.number, DEADLINE_S)
                    local.close(DEADLINE_S)
            finally:
                over.set()
            assert load.result(DEADLINE_S) > 0
        assert np.array_equal(received, pattern(REMOTE_SEED, NBYTES))

    @both_ways
    def test_a_cancelled_transfer_lets_go_of_its_memory(
        self, engine: TransferEngine, target: Target, way: str
    ) -> None:
        """``wait`` raises at once, and local memory is the caller's again."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        transfer = self.endless(engine, way, remote, local)
        transfer.cancel()
        with pytest.raises(TransferCancelled):
            transfer.wait(DEADLINE_S)
        assert transfer.done()
        assert 0 < transfer.bytes_done < transfer.nbytes
        memory[:] = pattern(LAST_SEED, NBYTES)
        self.check_works(engine, target)
        assert np.array_equal(memory, pattern(LAST_SEED, NBYTES))
        local.close(DEADLINE_S)

    def test_a_deadline_ends_a_transfer(self, engine: TransferEngine, target: Target) -> None:
        """When it passes, the transfer is over and its memory is the caller's again."""
        remote = engine.import_region(target.allocate(NBYTES, REMOTE_SEED).descriptor)
        transfer = self.endless(engine, "read", remote)
        with pytest.raises(TransferTimeout):
            transfer.wait(0.01)
        assert transfer.done()
        self.check_works(engine, target)

    @both_ways
    def test_a_peer_that_hangs_does_not_hold_memory(
        self, engine: TransferEngine, peer: PeerProcess, way: str
    ) -> None:
        """A stopped process: the transfer succeeds without it or ends by its deadline; the region closes."""
        remote = engine.import_region(peer.allocate(NBYTES, REMOTE_SEED).descriptor)
        local, _ = self.local(engine, NBYTES, LOCAL_SEED)
        engine.read(local, remote, [[0, 0, 1024]]).wait(DEADLINE_S)
        peer.pause()
        try:
            transfer = (engine.read if way == "read" else engine.write)(local, remote, [[0, 0, NBYTES]])
            try:
                transfer.wait(0.2)
            except TransferTimeout:
                assert transfer.done()
            local.close(DEADLINE_S)
        finally:
            peer.resume()
        self.check_works(engine, peer)

    @both_ways
    def test_the_death_of_a_peer_ends_its_transfers(
        self, engine: TransferEngine, peer: PeerProcess, standing_peer: PeerProcess, way: str
    ) -> None:
        """Killed in the middle: PeerUnreachable, also for what comes later; other peers go on."""
        remote = engine.import_region(peer.allocate(NBYTES, REMOTE_SEED).descriptor)
        transfer = self.endless(engine, way, remote)
        peer.kill()
        with pytest.raises(PeerUnreachable):
            transfer.wait(PEER_LOSS_S)
        local, _ = self.local(engine, NBYTES, LOCAL_SEED)
        with pytest.raises(PeerUnreachable):
            engine.read(local, remote, [[0, 0, NBYTES]]).wait(PEER_LOSS_S)
        local.close(DEADLINE_S)
        self.check_works(engine, standing_peer)
        standing_peer.clear()

    def test_a_peer_that_closes_ends_its_transfers(
        self, engine: TransferEngine, engines: Callable[[], TransferEngine]
    ) -> None:
        """An orderly end shows as one, too."""
        owner = self.owner(engines())
        remote = engine.import_region(owner.allocate(NBYTES, REMOTE_SEED).descriptor)
        transfer = self.endless(engine, "read", remote)
        owner.engine.close()
        with pytest.raises((PeerUnreachable, RegionRefused)):
            transfer.wait(PEER_LOSS_S)
        self.check_works(engine, self.owner(engines()))

    @both_ways
    def test_closing_an_engine_ends_its_transfers(
        self, engines: Callable[[], TransferEngine], target: Target, way: str
    ) -> None:
        """Who waits for them gets EngineClosed; their target goes on."""
        engine = engines()
        remote = engine.import_region(target.allocate(NBYTES, REMOTE_SEED).descriptor)
        transfer = self.endless(engine, way, remote)
        outcome: list[BaseException | None] = []

        def wait() -> None:
            try:
                transfer.wait(DEADLINE_S)
                outcome.append(None)
            except EngineClosed as error:
                outcome.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        began = time.monotonic()
        engine.close()
        waiter.join(DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S
        assert len(outcome) == 1
        assert isinstance(outcome[0], EngineClosed)
        self.check_works(engines(), target)

    def test_a_fork_leaves_the_parent_alone(
        self, engines: Callable[[], TransferEngine], target: Target
    ) -> None:
        """While a forked child lives, the parent moves bytes, and closes its engine."""
        engine = engines()
        self.check_works(engine, target)
        kept, given = os.pipe()
        with warnings.catch_warnings():
            # Python warns that a child of a process with threads may hang. This one only waits and ends.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.close(given)
            os.read(kept, 1)
            os._exit(0)
        try:
            self.check_works(engine, target)
            engine.close()
            self.check_works(engines(), target)
        finally:
            os.close(given)
            os.close(kept)
            assert os.waitpid(child, 0)[1] == 0
