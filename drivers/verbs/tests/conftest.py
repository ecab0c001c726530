"""Builds the double of libibverbs, and has every process of a test find the driver that uses it."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_transfer.plugins import driver_plugins

HERE = Path(__file__).parent
CORE = HERE.parent / "core"
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


@pytest.fixture(scope="session")
def compiler() -> list[str]:
    """The command of the C++ compiler that built the core, with what every program of the tests needs."""
    found = os.environ.get("CXX") or shutil.which("c++")
    assert found, "the double of libibverbs is built with a C++20 compiler: set CXX"
    return [*found.split(), "-std=c++20", "-O2", "-pthread", f"-I{CORE}"]


@pytest.fixture(scope="session")
def double_library(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double, built."""
    library = tmp_path_factory.mktemp("double") / "libibverbs_double.so"
    sources = sorted(str(source) for source in (HERE / "double").glob("*.cpp"))
    command = [*compiler, "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(library), *sources, "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="package", autouse=True)
def double(double_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The library, in use; beside it the file that stands for the network between the processes."""
    folder = tmp_path_factory.mktemp("plugin")
    found = folder / "verbs_double-0.dist-info"
    found.mkdir()
    (folder / "verbs_double_library.py").write_text(f"LIBRARY = {str(double_library)!r}\n")
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
        yield double_library
    driver_plugins.cache_clear()


@pytest.fixture(scope="package")
def fabric(double: Path) -> Fabric:
    """The network of the double."""
    return Fabric(double)
