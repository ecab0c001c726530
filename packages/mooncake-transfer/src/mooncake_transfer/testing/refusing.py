"""The part of the driver suite that asks for what must not be had."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_transfer import Region, RemoteRegion, TransferEngine, _wire
from mooncake_transfer.errors import RegionRefused
from mooncake_transfer.testing.fixtures import DEADLINE_S, Bytes, DriverFixtures
from mooncake_transfer.testing.owner import OwnedRegion, Target
from mooncake_transfer.testing.pattern import digest, pattern

__all__ = ["Refuses"]

NBYTES = 64 << 10
LAST = (1 << 64) - 1
LOCAL_SEED, REMOTE_SEED = 1, 2


def _forged(descriptor: bytes, **changes: Any) -> bytes:
    """A descriptor with some fields replaced, as an attacker would."""
    found = msgspec.msgpack.decode(descriptor, type=_wire.Descriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(found, **changes))


class Refuses(DriverFixtures):
    """A target lets nobody at memory without its key, outside a region, or after it was closed."""

    def check_refused(
        self,
        engine: TransferEngine,
        target: Target,
        owned: OwnedRegion,
        remote: RemoteRegion,
        block: list[int],
    ) -> None:
        """Read and write are refused at the target, and no byte changes on either side."""
        before = target.digest(owned.number)
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        for move in (engine.write, engine.read):
            with pytest.raises(RegionRefused):
                move(local, remote, np.array([block], dtype=np.uint64)).wait(DEADLINE_S)
        assert target.digest(owned.number) == before
        assert np.array_equal(memory, pattern(LOCAL_SEED, NBYTES))
        self.check_works(engine, target)

    def check_works(self, engine: TransferEngine, target: Target) -> None:
        """What was refused did no harm: the same two engines move bytes."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        engine.read(local, engine.import_region(owned.descriptor), [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert np.array_equal(memory, pattern(REMOTE_SEED, NBYTES))

    @pytest.mark.parametrize("byte", [0, 15])
    def test_a_wrong_access_key_is_refused(self, engine: TransferEngine, target: Target, byte: int) -> None:
        """One bit of the key, in its first or last byte, is enough."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        key = bytearray(msgspec.msgpack.decode(owned.descriptor, type=_wire.Descriptor).key)
        key[byte] ^= 1
        remote = engine.import_region(_forged(owned.descriptor, key=bytes(key)))
        self.check_refused(engine, target, owned, remote, [0, 0, NBYTES])

    def test_a_region_that_never_was_is_refused(self, engine: TransferEngine, target: Target) -> None:
        """An id that the target never gave out."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        number = msgspec.msgpack.decode(owned.descriptor, type=_wire.Descriptor).region_id
        remote = engine.import_region(_forged(owned.descriptor, region_id=number + 1_000_000))
        self.check_refused(engine, target, owned, remote, [0, 0, NBYTES])

    def test_a_range_outside_a_region_never_leaves_the_engine(
        self, engine: TransferEngine, target: Target
    ) -> None:
        """One byte too far, on either side, and sums that would wrap around."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        outside = [[0, 1, NBYTES], [1, 0, NBYTES], [0, NBYTES, 1], [0, LAST, 2], [LAST, 0, 2], [0, 0, LAST]]
        for block in outside:
            for move in (engine.write, engine.read):
                with pytest.raises(RegionRefused):
                    move(local, remote, np.array([[0, 0, 1], block], dtype=np.uint64))
        assert target.digest(owned.number) == digest(pattern(REMOTE_SEED, NBYTES))
        assert np.array_equal(memory, pattern(LOCAL_SEED, NBYTES))

    @pytest.mark.parametrize(
        ("length", "offset", "count"),
        [(NBYTES + 1, NBYTES, 1), (NBYTES + 1, 1, NBYTES), (LAST, LAST - 8, 8), (LAST, LAST - 8, 1)],
        ids=["next byte", "one byte over", "end of all", "would wrap"],
    )
    def test_a_forged_length_does_not_reach_beyond_the_region(
        self, engine: TransferEngine, target: Target, length: int, offset: int, count: int
    ) -> None:
        """The target knows how long its region is, whatever the descriptor says."""
        if any(number % self.quirks.alignment for number in (offset, count)):
            pytest.skip(f"driver {self.driver!r} needs multiples of {self.quirks.alignment}")
        owned = target.allocate(NBYTES, REMOTE_SEED)
        remote = engine.import_region(_forged(owned.descriptor, length=length))
        self.check_refused(engine, target, owned, remote, [0, offset, count])

    def test_a_closed_region_is_refused(self, engine: TransferEngine, target: Target) -> None:
        """By who has used it before, and by who comes with its descriptor later."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        known = engine.import_region(owned.descriptor)
        local, _ = self.local(engine, NBYTES, LOCAL_SEED)
        engine.read(local, known, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        target.close_region(owned.number, DEADLINE_S)
        for remote in (known, engine.import_region(owned.descriptor)):
            self.check_refused(engine, target, owned, remote, [0, 0, NBYTES])

    def test_a_refusal_leaves_other_transfers_alone(self, engine: TransferEngine, target: Target) -> None:
        """Good and bad transfers between the same two engines, all in flight together."""
        nbytes = 1 << 20
        owned = target.allocate(nbytes, REMOTE_SEED)
        good = engine.import_region(owned.descriptor)
        bad = engine.import_region(_forged(owned.descriptor, key=bytes(16)))
        places: list[tuple[Region, Bytes]] = [self.local(engine, nbytes, LOCAL_SEED) for _ in range(6)]
        moves = [
            engine.read(region, bad if index % 2 else good, [[0, 0, nbytes]])
            for index, (region, _) in enumerate(places)
        ]
        for index, (move, (_, memory)) in enumerate(zip(moves, places, strict=True)):
            if index % 2:
                with pytest.raises(RegionRefused):
                    move.wait(DEADLINE_S)
                assert np.array_equal(memory, pattern(LOCAL_SEED, nbytes))
            else:
                move.wait(DEADLINE_S)
                assert np.array_equal(memory, pattern(REMOTE_SEED, nbytes))
