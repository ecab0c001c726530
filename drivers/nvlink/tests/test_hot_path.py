"""What the core costs by itself, over a double of libcuda."""

from __future__ import annotations

from cuda_double import installed

from mooncake_transfer.testing.hot_path import HotPath, allocations


def test_the_hot_path_allocates_nothing() -> None:
    """Batches of 1,024 small writes between GPU memories."""
    kind = "cuda_memory:malloc"
    with installed() as library:
        found = allocations(HotPath("nvlink", {"library": str(library)}, near=kind, far=kind), 64)
    assert found.before > 0, "the allocator of the test is not in use"
    assert found.allocations == 0
