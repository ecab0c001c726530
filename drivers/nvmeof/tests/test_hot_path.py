"""What the core costs by itself: operations of files, and commands of the initiator from user space."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_transfer.testing.hot_path import HotPath, allocations

HERE = Path(__file__).parent
SERVED = HotPath(
    "nvmeof",
    {},
    far="served_namespace:ServedNamespace",
    batch=64,
    block_bytes=512,
    warm_up=8,
    environment={"NVME_TARGET_HOST": "127.0.0.1", "PYTHONPATH": str(HERE)},
)
FILED = HotPath(
    "nvmeof",
    {},
    far="file_memory:FileMemory",
    batch=256,
    block_bytes=4096,
    environment={"PYTHONPATH": str(HERE)},
)


@pytest.mark.parametrize("path", [FILED, SERVED], ids=["file", "initiator"])
def test_the_hot_path_allocates_nothing(path: HotPath) -> None:
    """Batches of small aligned writes."""
    found = allocations(path, 8)
    assert found.before > 0, "the allocator of the test is not in use"
    assert found.allocations == 0
