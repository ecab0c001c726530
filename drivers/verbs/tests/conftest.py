"""Builds the double of libibverbs, and has every process of a test find the driver that uses it."""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_transfer.plugins import driver_plugins

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "double"))

from verbs_double import build  # noqa: E402

DEVICES = 8


class Fabric:
    """What every process with the double sees, to look at and to break things with.

    The layout is that of ``Fabric`` in double/shared.hpp: down, frozen, violations, carried.
    """

    def __init__(self, library: Path) -> None:
        with Path(f"{library}.fabric").open("a+b") as file:
            file.truncate(max(file.tell(), mmap.PAGESIZE))
            self._bytes = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def set_down(self, device: int, down: bool) -> None:
        """Take the link of a device away, or give it back."""
        self._bytes[device] = int(down)

    def set_frozen(self, device: int, frozen: bool) -> None:
        """Have a device leave undone what was posted to it, or go on."""
        self._bytes[DEVICES + device] = int(frozen)

    @property
    def violations(self) -> int:
        """How many rules of verbs were broken so far, over all processes."""
        return self._word(0)

    def carried(self, device: int) -> int:
        """Bytes that left by a device."""
        return self._word(1 + device)

    def _word(self, index: int) -> int:
        value: int = struct.unpack_from("<Q", self._bytes, 2 * DEVICES + 8 * index)[0]
        return value


@pytest.fixture(scope="package", autouse=True)
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The library, in use; beside it the file that stands for the network between the processes."""
    folder = tmp_path_factory.mktemp("plugin")
    library = build(folder)
    found = folder / "verbs_double-0.dist-info"
    found.mkdir()
    (folder / "verbs_double_library.py").write_text(f"LIBRARY = {str(library)!r}\n")
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: verbs-double\nVersion: 0\n")
    (found / "entry_points.txt").write_text(
        "[mooncake_transfer.drivers]\nverbs_double = verbs_double_plugin\n"
    )
    paths = [str(folder), str(HERE / "double")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*paths, *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
        # Other tests of this run may have had the plugins listed before, and will again.
        driver_plugins.cache_clear()
        yield library
    driver_plugins.cache_clear()


@pytest.fixture(scope="package")
def fabric(double: Path) -> Fabric:
    """The network of the double."""
    return Fabric(double)
