"""An engine that nobody closes leaves nothing behind once nobody refers to it."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

from mooncake_transfer import FileSource, TransferEngine
from mooncake_transfer.testing.fake import FakeFabric


def open_files() -> list[str]:
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder is gone
            names.append(str(entry.readlink()))
    return names


def test_dropped_engines_keep_no_descriptor_of_memory_or_files(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(4096))

    def kept() -> int:
        return sum("dropped-engine" in name or name == str(path) for name in open_files())

    with FakeFabric() as fabric:
        for number in range(20):
            config = fabric.config(f"host-{number}", options={"kinds": "dram,file"})
            engine = TransferEngine(config)
            engine.allocate(4096, name="dropped-engine")
            engine.register(FileSource(path))
            assert kept() >= 2
            del engine
        gc.collect()
        assert kept() == 0
