"""A pool in a file of main memory, which every test of this folder can have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

POOL_BYTES = 1 << 30
SHARED_MEMORY = Path("/dev/shm")  # tmpfs on any Linux; elsewhere a file's pages may go to a disk


@pytest.fixture(scope="session")
def pool_folder() -> Iterator[Path]:
    """A folder for pools, gone after the session."""
    with tempfile.TemporaryDirectory(prefix="mooncake-cxl-", dir=SHARED_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def pool_path(pool_folder: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where a pool of the test's own may be made."""
    path = pool_folder / request.node.name.replace("/", "_")[:100]
    yield path
    path.unlink(missing_ok=True)
