"""What the core costs by itself."""

from __future__ import annotations

from mooncake_transfer.testing.hot_path import HotPath, allocations


def test_the_hot_path_allocates_nothing() -> None:
    """Batches of 1,024 small writes, which are copied at once."""
    found = allocations(HotPath("shm", {}), 64)
    assert found.before > 0, "the allocator of the test is not in use"
    assert found.allocations == 0
