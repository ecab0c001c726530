"""The nvlink driver passes the suite of all drivers, over a double of libcuda that enforces its rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import ClassVar

import pytest
from cuda_double import installed
from cuda_memory import GpuMemory, gpu

from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.testing import DriverConformance, Quirks, pattern
from mooncake_transfer.testing.fixtures import Bytes
from mooncake_transfer.testing.moving import MovesBytes
from mooncake_transfer.testing.owner import make_device_memory


class OverDouble:
    """Installs a double for the tests of a class; regions on both sides are of the class' kinds."""

    driver = "nvlink"
    settings: ClassVar[dict[str, int]] = {}
    local_kind = ""
    _stack: ClassVar[ExitStack]

    @classmethod
    def setup_class(cls) -> None:
        cls._stack = ExitStack()
        library = cls._stack.enter_context(installed(**cls.settings))
        cls.driver_options = {"library": str(library)}
        super().setup_class()  # type: ignore[misc]

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()  # type: ignore[misc]
        cls._stack.close()

    @pytest.fixture(autouse=True)
    def _keeps_the_rules(self) -> Iterator[None]:
        yield
        assert gpu(str(self._folder())).violation() == ""

    def _folder(self) -> str:
        return str(self.driver_options["library"]).rpartition("/")[0]  # type: ignore[attr-defined]

    def local(self, engine: TransferEngine, nbytes: int, seed: int) -> tuple[Region, Bytes]:
        if not self.local_kind:
            return super().local(engine, nbytes, seed)  # type: ignore[misc,no-any-return]
        memory = make_device_memory(self.local_kind, nbytes)
        assert isinstance(memory, GpuMemory)
        memory.set(pattern(seed, nbytes))
        return engine.register(memory.source), memory.whole()


class TestGpuMemory(OverDouble, DriverConformance):
    """Of cuMemAlloc: by its address in the same process, by legacy IPC handles between processes."""

    quirks = Quirks(same_host_only=True, target_kind="cuda_memory:malloc")
    local_kind = "cuda_memory:malloc"


class TestMappedMemory(OverDouble, MovesBytes):
    """Of virtual memory management, by descriptors."""

    quirks = Quirks(same_host_only=True, target_kind="cuda_memory:mapped")
    local_kind = "cuda_memory:mapped_whole"


class TestManagedMemory(OverDouble, MovesBytes):
    """What cannot be exported is staged; without cuMemcpyBatchAsync, and between GPUs that are apart."""

    settings: ClassVar[dict[str, int]] = {"VERSION": 12000, "PEERS": 0}
    quirks = Quirks(same_host_only=True, target_kind="cuda_memory:managed")
    local_kind = "cuda_memory:malloc"


class TestMainMemory(OverDouble, MovesBytes):
    """Mapped where it has a descriptor, staged where not; with CUDA 12's cuMemcpyBatchAsync."""

    settings: ClassVar[dict[str, int]] = {"VERSION": 12080}
    quirks = Quirks(same_host_only=True)
