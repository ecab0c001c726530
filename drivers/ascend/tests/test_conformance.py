"""The ascend driver passes the suite of all drivers, over doubles of ACL and HIXL that keep their rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import pytest
from cann import installed
from npu_memory import NpuMemory, violation

from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.testing import DriverConformance, Quirks, pattern
from mooncake_transfer.testing.fixtures import DEADLINE_S, Bytes, DriverFixtures
from mooncake_transfer.testing.owner import Target, make_device_memory
from mooncake_transfer.testing.pattern import digest

KIND = "npu_memory:huge"


class OverDoubles:
    """Installs the doubles for the tests of a class; regions of the target are of NPU memory."""

    driver = "ascend"
    quirks = Quirks(target_kind=KIND)
    _stack: ClassVar[ExitStack]
    driver_options: ClassVar[dict[str, Any]] = {}

    @classmethod
    def setup_class(cls) -> None:
        cls._stack = ExitStack()
        cann = cls._stack.enter_context(installed())
        cls.driver_options = {"library": str(cann / "lib64" / "libascendcl.so")}
        super().setup_class()  # type: ignore[misc]

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()  # type: ignore[misc]
        cls._stack.close()

    @pytest.fixture(autouse=True)
    def _keeps_the_rules(self) -> Iterator[None]:
        yield
        assert violation() == ""


class TestDeviceMemory(OverDoubles, DriverConformance):
    """Registered with HIXL on both sides; copied by ACL within a process."""

    def local(self, engine: TransferEngine, nbytes: int, seed: int) -> tuple[Region, Bytes]:
        memory = make_device_memory(KIND, nbytes)
        assert isinstance(memory, NpuMemory)
        memory.set(pattern(seed, nbytes))
        return engine.register(memory.source), memory.whole()


class TestMainMemory(OverDoubles, DriverFixtures):
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
