"""The driver passes the suite of the transfer engine, over a pool in a file of main memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

from mooncake_driver_cxl import Pool
from mooncake_transfer import TransferConfig
from mooncake_transfer.testing import DriverConformance, Quirks
from mooncake_transfer.testing.fixtures import DriverFixtures
from mooncake_transfer.testing.moving import MovesBytes
from mooncake_transfer.testing.refusing import Refuses

SHARED_MEMORY = Path("/dev/shm")
POOL_BYTES = 1 << 30


class OverPool(DriverFixtures):
    """Engines of one host with one pool."""

    driver = "cxl"
    quirks = Quirks(same_host_only=True, own_memory_only=True)
    options: ClassVar[dict[str, str | int | float | bool]] = {}
    _folder: ClassVar[tempfile.TemporaryDirectory[str]]

    @classmethod
    def setup_class(cls) -> None:
        """Make the pool, then what the suite needs."""
        cls._folder = tempfile.TemporaryDirectory(prefix="mooncake-cxl-", dir=SHARED_MEMORY)
        path = Path(cls._folder.name) / "pool"
        with path.open("wb") as file:
            file.truncate(POOL_BYTES)
        Pool.format(str(path), **cls.options)
        cls.driver_options = {"path": str(path), **cls.options}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        """Remove the pool, when its last member has gone."""
        super().teardown_class()
        cls._folder.cleanup()

    @classmethod
    def config(cls, **settings: Any) -> TransferConfig:
        """An engine whose memory comes from the pool."""
        options = {cls.driver: cls.driver_options}
        return TransferConfig(
            drivers=(cls.driver,), driver_options=options, allocate_from=cls.driver, **settings
        )


class TestCxl(OverPool, DriverConformance):
    """As it comes."""


class TestCxlFlushed(OverPool, MovesBytes, Refuses):
    """With every line flushed and dropped, as between hosts without coherence."""

    options: ClassVar[dict[str, str | int | float | bool]] = {"coherent": "false"}
