"""Fixtures of the driver suite: engines with one driver, targets near and far, a check for leftovers."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_transfer import Region, TransferConfig, TransferEngine
from mooncake_transfer.testing.owner import RegionOwner, Target
from mooncake_transfer.testing.pattern import pattern
from mooncake_transfer.testing.peer_process import PeerProcess
from mooncake_transfer.testing.quirks import Quirks

__all__ = ["DEADLINE_S", "DriverFixtures", "bytes_of", "wait_until"]

# No test waits longer for any one thing: generous, because machines that run tests are busy.
DEADLINE_S = 20.0
SETTLE_S = 20.0
POLL_S = 0.002

Bytes = npt.NDArray[np.uint8]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Return as soon as the condition holds; fail, naming ``what`` was awaited, when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


def bytes_of(region: Region) -> Bytes:
    """A region's memory as a writable array, without a copy."""
    return np.frombuffer(region.view(), dtype=np.uint8)


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))  # noqa: PTH208 - names, not paths


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


class DriverFixtures:
    """What the tests of the suite stand on. See DriverConformance for what a driver sets."""

    driver: ClassVar[str]
    quirks: ClassVar[Quirks] = Quirks()
    driver_options: ClassVar[dict[str, str | int | float | bool]] = {}

    @classmethod
    def config(cls, **settings: Any) -> TransferConfig:
        """Settings of an engine that has only this driver."""
        options = {cls.driver: cls.driver_options}
        return TransferConfig(drivers=(cls.driver,), driver_options=options, **settings)

    @classmethod
    def owner(cls, engine: TransferEngine) -> RegionOwner:
        """A target in this process whose regions are of the driver's kind."""
        return RegionOwner(engine, cls.quirks.target_kind)

    @classmethod
    def peer_process(cls, config: TransferConfig | None = None) -> PeerProcess:
        """A target in a process of its own, likewise."""
        return PeerProcess(config or cls.config(), kind=cls.quirks.target_kind)

    _standing: ClassVar[PeerProcess | None] = None

    @classmethod
    def setup_class(cls) -> None:
        """Start the standing peer; pytest calls this before the first test of the class."""
        if not cls.quirks.same_process_only:
            cls._standing = cls.peer_process()

    @classmethod
    def teardown_class(cls) -> None:
        """End the standing peer."""
        if cls._standing is not None:
            cls._standing.close()
            cls._standing = None

    @pytest.fixture(autouse=True)
    def _nothing_left_behind(self, request: pytest.FixtureRequest) -> Iterator[None]:
        failed = request.session.testsfailed
        threads, before = len(_threads()), _descriptors()
        yield
        if request.session.testsfailed > failed:
            return  # its traceback keeps alive what the test made
        deadline = time.monotonic() + SETTLE_S
        while len(_threads()) > threads or len(_descriptors()) > len(before):
            if time.monotonic() > deadline:
                extra = {number: where for number, where in _descriptors().items() if number not in before}
                pytest.fail(f"left behind: {len(_threads()) - threads} threads, descriptors {extra}")
            gc.collect()

    @pytest.fixture
    def engines(self) -> Iterator[Callable[[], TransferEngine]]:
        """Makes engines; closed after the test."""
        with ExitStack() as stack:

            def make() -> TransferEngine:
                # Weakly, because pytest holds on to fixtures longer than the check for leftovers waits.
                engine = stack.enter_context(TransferEngine(self.config()))
                return cast(TransferEngine, weakref.proxy(engine))

            yield make

    @pytest.fixture
    def engine(self, engines: Callable[[], TransferEngine]) -> TransferEngine:
        """The initiator of the test."""
        return engines()

    @pytest.fixture
    def standing_peer(self) -> PeerProcess | None:
        """A process that serves all tests which leave it as it was; None when the driver reaches none."""
        return self._standing

    @pytest.fixture
    def peer(self) -> Iterator[PeerProcess]:
        """A process of the test's own, to do anything to."""
        if self.quirks.same_process_only:
            pytest.skip(f"driver {self.driver!r} does not reach other processes")
        with self.peer_process() as peer:
            yield peer

    @pytest.fixture(params=["same process", "other process"])
    def target(
        self,
        request: pytest.FixtureRequest,
        engines: Callable[[], TransferEngine],
        standing_peer: PeerProcess | None,
    ) -> Iterator[Target]:
        """The other side, once in this process and once in another one."""
        target: Target | None = standing_peer
        if request.param == "same process":
            target = self.owner(engines())
        if target is None:
            pytest.skip(f"driver {self.driver!r} does not reach other processes")
        yield target
        target.clear()

    def local(self, engine: TransferEngine, nbytes: int, seed: int) -> tuple[Region, Bytes]:
        """A region of the engine filled with a pattern, and its memory."""
        region = engine.allocate(nbytes)
        memory = bytes_of(region)
        memory[:] = pattern(seed, nbytes)
        return region, memory
