"""Tests of this folder share providers.py, and leave nothing of libfabric's shm provider behind."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

SHM = Path("/dev/shm")
OF_A_PROCESS = re.compile(r"(\d+):\d+:\d+")


@pytest.fixture(scope="package", autouse=True)
def _no_memory_of_killed_peers_stays() -> Iterator[None]:
    """The provider's own handler does not run in a process that is killed."""
    before = {entry.name for entry in SHM.iterdir()}
    yield
    for entry in SHM.iterdir():
        found = OF_A_PROCESS.fullmatch(entry.name)
        if found and entry.name not in before and not Path("/proc", found[1]).exists():
            entry.unlink(missing_ok=True)
