"""Large batches are copied in several ways, as the driver tries which is fastest; all must be right."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_transfer import TransferConfig, TransferEngine

SEED = 20261130
MIB = 1 << 20
# The trials of a size begin after 8 batches, and take 4 of each other way.
BATCHES = 40
SIZE = 8 * MIB


@pytest.mark.parametrize("inline_bytes", [0, 1 << 40], ids=["by the pool", "on the spot"])
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_every_way_of_copying_that_is_tried_moves_just_the_right_bytes(
    inline_bytes: int, write: bool
) -> None:
    random = np.random.default_rng(SEED)
    config = TransferConfig(
        drivers=("shm",), driver_options={"shm": {"inline_bytes": inline_bytes, "workers": 3}}
    )
    with TransferEngine(config) as owner, TransferEngine(config) as worker:
        target, local = owner.allocate(SIZE), worker.allocate(SIZE)
        here, there = (np.frombuffer(region.view(), dtype=np.uint8) for region in (local, target))
        remote = worker.import_region(target.descriptor())
        move = worker.write if write else worker.read
        source, destination = (here, there) if write else (there, here)
        for number in range(BATCHES):
            source[:] = random.integers(0, 256, SIZE, dtype=np.uint8)
            destination[:] = number
            # Odd places and lengths: one long operation, and several that are cut at both ends.
            rows = [
                [3 + number, 5, MIB + 77],
                [2 * MIB + 1, 2 * MIB + 64, 3 * MIB - 13],
                [6 * MIB, 6 * MIB, 65],
            ]
            expected = destination.copy()
            for local_offset, remote_offset, length in rows:
                pair = (local_offset, remote_offset) if write else (remote_offset, local_offset)
                expected[pair[1] : pair[1] + length] = source[pair[0] : pair[0] + length]
            move(local, remote, rows).wait(30)
            assert np.array_equal(destination, expected), f"batch {number}, seed {SEED}"
        del here, there, source, destination
