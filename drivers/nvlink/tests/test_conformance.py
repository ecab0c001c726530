"""The nvlink driver passes the suite of all drivers, over a double of libcuda that enforces its rules."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from cuda_double import installed
from cuda_memory import gpu

from mooncake_transfer.testing import DriverConformance, Quirks
from mooncake_transfer.testing.moving import MovesBytes
from mooncake_transfer.testing.over_double import OverDouble


def _violation(library: Path) -> str:
    return gpu(str(library.parent)).violation()


class OverCuda(OverDouble):
    """Regions on both sides are of the class' kinds."""

    driver = "nvlink"
    install = staticmethod(installed)
    violation = staticmethod(_violation)


class TestGpuMemory(OverCuda, DriverConformance):
    """Of cuMemAlloc: by its address in the same process, by legacy IPC handles between processes."""

    quirks = Quirks(same_host_only=True, target_kind="cuda_memory:malloc")
    local_kind = "cuda_memory:malloc"


class TestMappedMemory(OverCuda, MovesBytes):
    """Of virtual memory management, by descriptors."""

    quirks = Quirks(same_host_only=True, target_kind="cuda_memory:mapped")
    local_kind = "cuda_memory:mapped_whole"


class TestManagedMemory(OverCuda, MovesBytes):
    """What cannot be exported is staged; without cuMemcpyBatchAsync, and between GPUs that are apart."""

    settings: ClassVar[dict[str, int]] = {"VERSION": 12000, "PEERS": 0}
    quirks = Quirks(same_host_only=True, target_kind="cuda_memory:managed")
    local_kind = "cuda_memory:malloc"


class TestMainMemory(OverCuda, MovesBytes):
    """Mapped where it has a descriptor, staged where not; with CUDA 12's cuMemcpyBatchAsync."""

    settings: ClassVar[dict[str, int]] = {"VERSION": 12080}
    quirks = Quirks(same_host_only=True)
