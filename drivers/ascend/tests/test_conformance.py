"""The ascend driver passes the suite of all drivers, over doubles of ACL and HIXL that keep their rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cann import installed
from npu_memory import violation

from mooncake_transfer import TransferEngine
from mooncake_transfer.testing import DriverConformance, Quirks, pattern
from mooncake_transfer.testing.fixtures import DEADLINE_S, DriverFixtures
from mooncake_transfer.testing.over_double import OverDouble
from mooncake_transfer.testing.owner import Target
from mooncake_transfer.testing.pattern import digest

KIND = "npu_memory:huge"


@contextmanager
def _installed() -> Iterator[Path]:
    with installed() as cann:
        yield cann / "lib64" / "libascendcl.so"


class OverCann(OverDouble):
    """Regions of the target are of NPU memory."""

    driver = "ascend"
    quirks = Quirks(target_kind=KIND)
    install = staticmethod(_installed)
    violation = staticmethod(lambda _: violation())


class TestDeviceMemory(OverCann, DriverConformance):
    """Registered with HIXL on both sides; copied by ACL within a process."""

    local_kind = KIND


class TestMainMemory(OverCann, DriverFixtures):
    """Through HIXL's own buffers: the engine's memory is not of aclrtMallocHost."""

    @pytest.mark.parametrize("kind", ["engine", KIND])
    def test_main_memory_moves_to_and_from_both_kinds(
        self, engine: TransferEngine, target: Target, kind: str
    ) -> None:
        nbytes, block = 1 << 20, 4096
        owned = target.allocate(nbytes, 2, kind)
        remote = engine.import_region(owned.descriptor)
        local, memory = self.local(engine, nbytes, 1)
        starts = np.arange(0, nbytes, 2 * block, np.uint64)
        blocks = np.stack([starts, starts, np.full(len(starts), block, np.uint64)], axis=1)
        engine.write(local, remote, blocks).wait(DEADLINE_S)
        expected = pattern(2, nbytes).copy()
        expected.reshape(-1, 2, block)[:, 0] = memory.reshape(-1, 2, block)[:, 0]
        assert target.digest(owned.number) == digest(expected)
        engine.read(local, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
        assert np.array_equal(memory, expected)
