"""A batch of reads or writes in flight."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator

from mooncake_transfer._core import Engine as CoreEngine
from mooncake_transfer._core import Transfer as CoreTransfer
from mooncake_transfer._errors import TransferTimeout

__all__ = ["Transfer"]


class Transfer:
    """A batch of reads or writes in flight. Thread-safe.

    The engine keeps local memory alive until its region is closed; the caller keeps what it writes unchanged
    until the transfer is done. A write is done when its bytes are visible at the target. Blocks may move in
    any order.
    """

    def __init__(self, engine: CoreEngine, core: CoreTransfer, what: str, timeout_s: float):
        self._engine = engine
        self._core = core
        self._what = what
        self._timeout_s = timeout_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every byte has moved. Safe to call twice.

        Raises PeerUnreachable, RegionRefused, NoRoute, TransferCancelled, EngineClosed, or TransferTimeout
        after ``timeout_s`` (default: ``transfer_timeout_s``); it has been cancelled then.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._engine.wait(self._core, limit_s):
            raise TransferTimeout(
                f"{self._what} did not finish within {limit_s:g} s: "
                f"{self.bytes_done} of {self.nbytes} bytes were moved; it was cancelled"
            )
        self._core.check()

    def done(self) -> bool:
        """Whether it has ended, well or not. ``wait()`` then returns, or raises, at once."""
        return self._core.done()

    def cancel(self) -> None:
        """Ask for an early end. ``wait()`` then raises TransferCancelled, or returns if it was too late."""
        self._engine.cancel(self._core)

    @property
    def nbytes(self) -> int:
        """Bytes to move in all."""
        return self._core.total_bytes

    @property
    def bytes_done(self) -> int:
        """Bytes known to have moved."""
        return self._core.bytes_done

    @property
    def seconds(self) -> float:
        """From submission to the end, or to now."""
        return self._core.seconds

    @property
    def bytes_by_driver(self) -> dict[str, int]:
        """Bytes moved, by the driver that moved them."""
        return self._engine.bytes_by_driver(self._core)

    def __await__(self) -> Generator[object, None, None]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> None:
        try:
            await asyncio.wait_for(self._until_done(), self._timeout_s)
        except asyncio.TimeoutError:
            pass  # wait() below raises TransferTimeout, after it has cancelled
        except asyncio.CancelledError:
            self.cancel()
            raise
        # Off the loop: a cancelled transfer may take a moment to let go of the memory.
        if self.done():
            self.wait()
        else:
            await asyncio.to_thread(self.wait, 0.0)

    async def _until_done(self) -> None:
        if self.done():
            return
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(signal, _set_done, finished)
        try:
            self._core.signal_when_done(signal)
            await finished
        finally:
            loop.remove_reader(signal)
            os.close(signal)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
