"""A segment may be memory of a driver."""

import tempfile
from pathlib import Path

import msgspec
import pytest

from mooncake_transfer import TransferConfig, TransferEngine


def test_a_pool_of_cxl_memory_is_lent_and_read_by_others(world, fast, content):
    pytest.importorskip("mooncake_driver_cxl")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pool = {"path": f"{folder}/pool", "create": True, "size_bytes": 64 << 20}
        options = TransferConfig(drivers=("cxl", "tcp"), driver_options={"cxl": pool})
        engines = [world.stack.enter_context(TransferEngine(options)) for _ in range(2)]
        config = msgspec.structs.replace(fast, lend_from="cxl")
        owner = world.store(engines[0], lend=8 << 20, config=config)
        reader = world.store(engines[1], engines[0].address)
        value = content(b"k", 1, 1 << 20)
        reader.put("k", value)
        assert owner.get("k") == reader.get("k") == value
        maps = Path("/proc/self/maps").read_text()
        assert f"{folder}/pool" in maps
        reader.close()
        owner.close()
