"""What the core costs by itself."""

from __future__ import annotations

from pathlib import Path

from mooncake_driver_cxl import Pool
from mooncake_transfer.testing.hot_path import HotPath, allocations


def test_the_hot_path_allocates_nothing(pool_path: Path) -> None:
    """Batches of 1,024 small writes, which are copied at once."""
    with pool_path.open("wb") as file:
        file.truncate(1 << 30)
    Pool.format(str(pool_path))
    found = allocations(HotPath("cxl", {"path": str(pool_path)}, allocate_from="cxl"), 64)
    assert found.before > 0, "the allocator of the test is not in use"
    assert found.allocations == 0
