"""How much HIXL registers, of a process and not of an endpoint: what is beyond is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cann import installed
from npu_memory import HUGE_ONLY, NpuMemory, violation

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import DriverUnavailable

MOST_RANGES = 256
PAGE = 2 << 20


@pytest.fixture
def two() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    """Two engines of this process, each with an engine of HIXL."""
    with installed() as cann:
        options = {"library": str(cann / "lib64" / "libascendcl.so")}
        config = TransferConfig(drivers=("ascend",), driver_options={"ascend": options})
        with TransferEngine(config) as first, TransferEngine(config) as second:
            yield first, second
        assert violation() == ""


def test_engines_of_a_process_share_its_256_ranges(two: tuple[TransferEngine, TransferEngine]) -> None:
    first, second = two
    memory = [NpuMemory(PAGE, HUGE_ONLY, 0) for _ in range(MOST_RANGES + 1)]
    regions = [first.register(each.source) for each in memory[:200]]
    regions += [second.register(each.source) for each in memory[200:MOST_RANGES]]
    with pytest.raises(DriverUnavailable, match="at most 256 ranges of a process, over all of its engines"):
        second.register(memory[-1].source)
    regions[0].close()
    second.register(memory[-1].source)
    first.close()  # gives back what it had
    more = [NpuMemory(PAGE, HUGE_ONLY, 0) for _ in range(MOST_RANGES - 57)]
    for each in more:
        second.register(each.source)


def test_engines_of_a_process_share_50_gigabytes(two: tuple[TransferEngine, TransferEngine]) -> None:
    first, second = two
    halves = [NpuMemory(26 << 30, HUGE_ONLY, 0) for _ in range(2)]
    region = first.register(halves[0].source)
    with pytest.raises(DriverUnavailable, match="at most 50 GB of device memory of a process"):
        second.register(halves[1].source)
    region.close()
    second.register(halves[1].source)
