"""The suite of all drivers over a double of a vendor's library, which a driver's tests build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.testing.owner import DeviceMemory, make_device_memory
from mooncake_transfer.testing.pattern import pattern

__all__ = ["OverDouble", "WholeMemory"]

Bytes = npt.NDArray[np.uint8]


class WholeMemory(DeviceMemory, Protocol):
    """Device memory of a double, which the processor reaches too."""

    def whole(self) -> Bytes:
        """Its bytes as one array, without a copy."""


class OverDouble:
    """The first base of a test class whose engines find a double. Its tests fail when they break a rule.

    Attributes:
        install: has processes that start now find the double, and gives its path; called with ``settings``.
        violation: a rule of the vendor that was broken without an error, of the double at that path; empty:
            none was.
        local_kind: memory of the class's own side, as ``make_device_memory`` names it; empty: the engine's.
    """

    install: ClassVar[Callable[..., AbstractContextManager[Path]]]
    violation: ClassVar[Callable[[Path], str]]
    settings: ClassVar[dict[str, int]] = {}
    local_kind: ClassVar[str] = ""
    driver_options: ClassVar[dict[str, str | int | float | bool]] = {}
    _stack: ClassVar[ExitStack]
    _double: ClassVar[Path]

    @classmethod
    def setup_class(cls) -> None:
        """Install the double before anything of the class starts."""
        cls._stack = ExitStack()
        cls._double = cls._stack.enter_context(cls.install(**cls.settings))
        cls.driver_options = {"library": str(cls._double)}
        super().setup_class()  # type: ignore[misc]

    @classmethod
    def teardown_class(cls) -> None:
        """Take it back when all of it has ended."""
        super().teardown_class()  # type: ignore[misc]
        cls._stack.close()

    @pytest.fixture(autouse=True)
    def _keeps_the_rules(self) -> Iterator[None]:
        yield
        assert type(self).violation(self._double) == ""

    def local(self, engine: TransferEngine, nbytes: int, seed: int) -> tuple[Region, Bytes]:
        """A region of the engine filled with a pattern, and its memory."""
        if not self.local_kind:
            return super().local(engine, nbytes, seed)  # type: ignore[misc,no-any-return]
        memory: WholeMemory = make_device_memory(self.local_kind, nbytes)  # type: ignore[assignment]
        memory.set(pattern(seed, nbytes))
        return engine.register(memory.source), memory.whole()
