"""The nvlink driver passes the suite of all drivers, over a double of libcuda that enforces its rules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

from build import installed

from mooncake_transfer.testing import DriverConformance, Quirks


class OverDouble(DriverConformance):
    driver = "nvlink"
    quirks = Quirks(same_host_only=True)
    settings: ClassVar[dict[str, int]] = {}
    _stack: ClassVar[ExitStack]

    @classmethod
    def setup_class(cls) -> None:
        cls._stack = ExitStack()
        library = cls._stack.enter_context(installed(**cls.settings))
        cls.driver_options = {"library": str(library)}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls._stack.close()


class TestMainMemory(OverDouble):
    """Regions of main memory: mapped where they have a descriptor, staged where not."""
