"""What the core costs by itself, over doubles of ACL and HIXL."""

from __future__ import annotations

import pytest
from cann import installed

from mooncake_transfer.testing.hot_path import HotPath, allocations

KIND = "npu_memory:huge"


@pytest.mark.parametrize("near", [KIND, ""], ids=["device", "main"])
def test_the_hot_path_allocates_nothing(near: str) -> None:
    """Batches of 1,024 small writes to NPU memory: from such, and from main memory by aclrtMemcpyBatch."""
    with installed() as cann:
        options = {"library": str(cann / "lib64" / "libascendcl.so")}
        found = allocations(HotPath("ascend", options, near=near, far=KIND), 64)
    assert found.before > 0, "the allocator of the test is not in use"
    assert found.allocations == 0
