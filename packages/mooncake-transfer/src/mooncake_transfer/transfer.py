"""A batch of reads or writes: prepared once, posted any number of times."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Literal

import msgspec

from mooncake_transfer import _core
from mooncake_transfer._errors import ConfigError, TransferError
from mooncake_transfer.grid import Blocks, Grid, as_blocks

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine
    from mooncake_transfer.region import Region, RemoteRegion

__all__ = ["Priority", "Transfer", "TransferState", "TransferStatus"]

Priority = Literal["high", "normal", "low"]


class TransferState(enum.Enum):
    """Where a transfer stands. The last three are its failures; ``wait()`` raises what they were."""

    PREPARED = "prepared"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"


class TransferStatus(msgspec.Struct, frozen=True):
    """A look at a transfer.

    Attributes:
        state: where it stands.
        bytes_done: bytes known to have moved in this run.
        nbytes: bytes to move in all.
        blocks: blocks it was made of.
        seconds: from ``post()`` to the end, or to now.
        failure: what made it fail; empty when nothing did.
    """

    state: TransferState
    bytes_done: int
    nbytes: int
    blocks: int
    seconds: float
    failure: str


class Transfer(_core.Transfer):
    """A batch of reads or writes. Thread-safe, but one run at a time.

    ``post()`` starts it, again after it has ended; ``wait()``, ``await`` and ``future()`` tell that it has.
    The engine keeps local memory alive until its region is closed; the caller keeps what it writes unchanged
    until the transfer is done. A write is done when its bytes are visible at the target. Blocks may move in
    any order.

    Attributes:
        local: the region of this engine.
        remote: the peer's region.
    """

    __slots__ = ("_engine", "local", "remote")

    def __init__(
        self, engine: TransferEngine, write: bool, local: Region, remote: RemoteRegion, blocks: Blocks
    ):
        if local._engine is not engine:
            raise ConfigError(f"region {local.name!r} is registered with another engine")
        core, ours, theirs = engine._core, local._require_core(), remote._require_core()
        timeout_s = engine.config.transfer_timeout_s
        if isinstance(blocks, Grid):
            super().__init__(core, write, ours, theirs, timeout_s, *blocks.arguments())
        else:
            super().__init__(core, write, ours, theirs, timeout_s, as_blocks(blocks))
        self._engine = engine
        self.local = local
        self.remote = remote

    def post(
        self,
        *,
        priority: Priority = "normal",
        deadline_s: float | None = None,
        notify: tuple[str, bytes] | None = None,
        stream: object | None = None,
        verify: bool | None = None,
    ) -> Transfer:
        """Start moving, and return this transfer. Never blocks on the peer.

        Args:
            priority: which of the transfers that wait for the same peer goes first. Waiting counts too: a
                ``low`` one is served at the latest after twice ``rails.aging_s``.
            deadline_s: end it (TransferTimeout) so many seconds from now, whether somebody waits or not.
            notify: ``(method, payload)`` for the peer's ``serve()`` handler, sent when the last byte is there
                and before the transfer counts as done.
            stream: a device stream (an integer handle, or an object of torch, cupy or cuda.core) in whose
                order the bytes move. Only drivers of device memory follow streams; NoRoute otherwise.
            verify: compare checksums of both ends; None: as ``TransferConfig.integrity`` says. Needs a
                descriptor that allows reading. Its deadlines hold for the comparison too.

        Raises ConfigError while it is running, and for a write that is to be verified with a descriptor of
        access ``w``; RegionClosed, EngineClosed.
        """
        if (verify is None and self._engine._integrity is None) or verify is False:
            if priority == "normal" and deadline_s is None and notify is None and stream is None:
                self.launch()
            else:
                self.launch(
                    priority=priority, deadline_s=deadline_s, notify=notify, stream=_stream_handle(stream)
                )
            return self
        self._engine._post_verified(
            self, priority=priority, deadline_s=deadline_s, notify=notify, stream=_stream_handle(stream)
        )
        return self

    def status(self) -> TransferStatus:
        """Return where it stands."""
        return TransferStatus(
            TransferState(self.state),
            self.bytes_done,
            self.nbytes,
            self.blocks,
            self.seconds,
            self.failure,
        )

    def future(self) -> concurrent.futures.Future[None]:
        """Return a future of this run: it gets None, or what ``wait()`` raises.

        Cancelling it does not cancel the transfer.
        """
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def ended() -> None:
            try:
                self.wait(0.0)
            except TransferError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        if self.done():
            ended()
        else:
            self._engine._watcher.watch(self, ended)
        return future

    def __await__(self) -> Generator[object, None, None]:
        """Wait without blocking the event loop; raises what ``wait()`` raises.

        Cancelling the awaiting task cancels the transfer.
        """
        return self._wait_async().__await__()

    async def _wait_async(self) -> None:
        try:
            await asyncio.wait_for(self._until_done(), self._engine.config.transfer_timeout_s)
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
        if self.state != "running":
            return
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(signal, _set_done, finished)
        try:
            self.signal_when_done(signal)
            await finished
        finally:
            loop.remove_reader(signal)
            os.close(signal)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _stream_handle(stream: object | None) -> int:
    """The native handle of a device stream: an int, or an object of torch, cupy or cuda.core."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    for attribute in ("cuda_stream", "npu_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return value
    raise ConfigError(f"stream is {type(stream).__name__}; pass its integer handle or a CUDA stream object")
