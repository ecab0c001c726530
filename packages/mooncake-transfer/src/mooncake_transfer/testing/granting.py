"""The part of the driver suite about keys of lesser rights, and about peers that come back as others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import PeerRestarted, PeerUnreachable, RegionRefused
from mooncake_transfer.testing.fixtures import DEADLINE_S, DriverFixtures, bytes_of, wait_until
from mooncake_transfer.testing.owner import Target
from mooncake_transfer.testing.pattern import digest, pattern
from mooncake_transfer.testing.ports import free_port

__all__ = ["Grants"]

NBYTES = 1 << 20
ALL = [[0, 0, NBYTES]]
ENDLESS_BLOCKS = 1 << 16
LOCAL_SEED, REMOTE_SEED, LAST_SEED = 1, 2, 9
PEERS = 64
PEER_BYTES = 64 << 10

needs_scoped_keys = pytest.mark.usefixtures("_scoped_keys")


class Grants(DriverFixtures):
    """A key opens what it was made for, for as long as its maker wants, and never somebody else's memory."""

    @pytest.fixture
    def _scoped_keys(self) -> None:
        if not self.quirks.scoped_keys:
            pytest.skip(f"driver {self.driver!r} has no keys of lesser rights")

    @needs_scoped_keys
    @pytest.mark.parametrize("access", ["r", "w", "rw"])
    def test_a_key_allows_what_it_was_made_for(
        self, engine: TransferEngine, target: Target, access: str
    ) -> None:
        """And nothing else: the other direction is refused, and no byte of it moves."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        remote = engine.import_region(target.grant(owned.number, access))
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        if "w" not in access:
            with pytest.raises(RegionRefused):
                engine.write(local, remote, ALL).wait(DEADLINE_S)
            assert target.digest(owned.number) == digest(pattern(REMOTE_SEED, NBYTES))
        if "r" in access:
            engine.read(local, remote, ALL).wait(DEADLINE_S)
            assert np.array_equal(memory, pattern(REMOTE_SEED, NBYTES))
        else:
            with pytest.raises(RegionRefused):
                engine.read(local, remote, ALL).wait(DEADLINE_S)
            assert np.array_equal(memory, pattern(LOCAL_SEED, NBYTES))
        if "w" in access:
            memory[:] = pattern(LAST_SEED, NBYTES)
            engine.write(local, remote, ALL).wait(DEADLINE_S)
            assert target.digest(owned.number) == digest(pattern(LAST_SEED, NBYTES))

    @needs_scoped_keys
    def test_a_revoked_key_is_refused_and_others_are_not(
        self, engine: TransferEngine, target: Target
    ) -> None:
        """Known to a peer before or after; the region's own key and other grants stand."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        granted, other = target.grant(owned.number, "r"), target.grant(owned.number, "r")
        known = engine.import_region(granted)
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        engine.read(local, known, ALL).wait(DEADLINE_S)
        target.revoke(owned.number, granted, DEADLINE_S)
        memory[:] = pattern(LOCAL_SEED, NBYTES)
        for remote in (known, engine.import_region(granted)):
            with pytest.raises(RegionRefused):
                engine.read(local, remote, ALL).wait(DEADLINE_S)
        assert np.array_equal(memory, pattern(LOCAL_SEED, NBYTES))
        for descriptor in (other, owned.descriptor):
            engine.read(local, engine.import_region(descriptor), ALL).wait(DEADLINE_S)
            assert np.array_equal(memory, pattern(REMOTE_SEED, NBYTES))

    @needs_scoped_keys
    @pytest.mark.parametrize("way", ["read", "write"])
    def test_revoking_a_key_ends_what_runs_under_it(
        self, engine: TransferEngine, target: Target, way: str
    ) -> None:
        """When ``revoke`` has returned, nobody who came with the key touches the memory."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        granted = target.grant(owned.number, "rw")
        local, _ = self.local(engine, NBYTES, LOCAL_SEED)
        blocks = np.tile(np.array(ALL, np.uint64), (ENDLESS_BLOCKS, 1))
        move = engine.read if way == "read" else engine.write
        transfer = move(local, engine.import_region(granted), blocks)
        wait_until(lambda: transfer.bytes_done > 0, "the transfer moves bytes")
        target.revoke(owned.number, granted, DEADLINE_S)
        target.fill(owned.number, LAST_SEED)
        with pytest.raises(RegionRefused):
            transfer.wait(DEADLINE_S)
        assert target.digest(owned.number) == digest(pattern(LAST_SEED, NBYTES))
        engine.read(local, engine.import_region(owned.descriptor), ALL).wait(DEADLINE_S)

    def test_a_successor_at_the_same_address_is_left_alone(self, engine: TransferEngine) -> None:
        """What was imported from a process that died never reaches the one that took its place."""
        if self.quirks.same_process_only:
            pytest.skip(f"driver {self.driver!r} does not reach other processes")
        config = self.config(port=free_port())
        local, _ = self.local(engine, NBYTES, LOCAL_SEED)
        with self.peer_process(config) as first:
            remote = engine.import_region(first.allocate(NBYTES, REMOTE_SEED).descriptor)
            engine.write(local, remote, ALL).wait(DEADLINE_S)
            first.kill()
        with self.peer_process(config) as second:
            owned = second.allocate(NBYTES, REMOTE_SEED)
            for move in (engine.write, engine.read):
                with pytest.raises((PeerUnreachable, PeerRestarted, RegionRefused)):
                    move(local, remote, ALL).wait(DEADLINE_S)
            assert second.digest(owned.number) == digest(pattern(REMOTE_SEED, NBYTES))
            engine.write(local, engine.import_region(owned.descriptor), ALL).wait(DEADLINE_S)
            assert second.digest(owned.number) == digest(pattern(LOCAL_SEED, NBYTES))

    def test_a_hundred_thousand_small_blocks_arrive(self, engine: TransferEngine, target: Target) -> None:
        """Far more than may be in flight at once, in one transfer and in no order."""
        slot = 64 if self.quirks.alignment <= 64 else self.quirks.alignment
        count = 100_000
        owned = target.allocate(count * slot, REMOTE_SEED)
        local, memory = self.local(engine, count * slot, LOCAL_SEED)
        places = np.random.default_rng(6).permutation(count).astype(np.uint64) * np.uint64(slot)
        blocks = np.stack([places, places, np.full(count, slot, np.uint64)], axis=1)
        engine.read(local, engine.import_region(owned.descriptor), blocks).wait(3 * DEADLINE_S)
        assert np.array_equal(memory, pattern(REMOTE_SEED, count * slot))

    def test_one_engine_serves_sixty_four_peers(
        self, engine: TransferEngine, engines: Callable[[], TransferEngine]
    ) -> None:
        """All of them read from it and write to it at once, each its own part."""
        total = PEERS * PEER_BYTES
        owner = self.owner(engine)
        source, sink = owner.allocate(total, REMOTE_SEED), owner.allocate(total, REMOTE_SEED)
        peers = [engines() for _ in range(PEERS)]
        transfers, places = [], []
        for index, peer in enumerate(peers):
            at = index * PEER_BYTES
            place = peer.allocate(PEER_BYTES)
            given, _ = self.local(peer, PEER_BYTES, 100 + index)
            places.append(bytes_of(place))
            transfers += [
                peer.read(place, peer.import_region(source.descriptor), [[0, at, PEER_BYTES]]),
                peer.write(given, peer.import_region(sink.descriptor), [[0, at, PEER_BYTES]]),
            ]
        for transfer in transfers:
            transfer.wait(3 * DEADLINE_S)
        assert np.array_equal(np.concatenate(places), pattern(REMOTE_SEED, total))
        written = np.concatenate([pattern(100 + index, PEER_BYTES) for index in range(PEERS)])
        assert owner.digest(sink.number) == digest(written)
