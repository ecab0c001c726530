"""A batch of reads or writes: prepared once, posted any number of times."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import msgspec

from mooncake_transfer import _core
from mooncake_transfer._arguments import flag, method_name, number, one_of, seconds, text, wrong
from mooncake_transfer._errors import ConfigError, EngineForked, MemoryInUse, TransferError, TransferTimeout
from mooncake_transfer._scarce import event_descriptor
from mooncake_transfer.grid import Blocks, Grid, as_blocks
from mooncake_transfer.region import Region, RemoteRegion

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine

__all__ = ["PostOptions", "Priority", "Transfer", "TransferFuture", "TransferState", "TransferStatus"]

Priority = Literal["high", "normal", "low"]

MOST_ATTEMPTS = (1 << 32) - 1
MESSAGE_BYTES = 64 << 20
LARGEST_HANDLE = (1 << 64) - 1
CANCEL_GRACE_S = 5.0
CANCEL_AGAIN_S = 0.1
LOOK_S = 0.005


class TransferState(enum.Enum):
    """Where a transfer stands. The last three are its failures; ``wait()`` raises what they were."""

    PREPARED = "prepared"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"


class PostOptions(TypedDict, total=False):
    """The keyword arguments of ``Transfer.post()``, which ``read()`` and ``write()`` take too."""

    priority: Priority
    deadline_s: float | None
    notify: tuple[str, bytes] | None
    stream: object | None
    verify: bool | None
    drivers: Sequence[str] | None
    attempts: int | None


class LaunchOptions(TypedDict):
    """What the core takes for one run; ``PostOptions``, checked."""

    priority: str
    deadline_s: float | None
    notify: tuple[str, bytes] | None
    stream: int
    drivers: Sequence[str]
    attempts: int


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
        # Nothing else is as easily mistaken as the order of these three.
        if not isinstance(local, Region):
            raise wrong("local", local, "a Region of this engine, as allocate() and register() return")
        if not isinstance(remote, RemoteRegion):
            raise wrong("remote", remote, "a RemoteRegion, as import_region() and find_region() return")
        if local._engine is not engine:
            raise ConfigError(f"local is region {local.name!r}, which is registered with another engine")
        if remote.peer._engine is not engine:
            raise ConfigError(
                f"remote is region {remote.name!r}, which another engine imported; import it here too"
            )
        flag(write, "write")
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
        drivers: Sequence[str] | None = None,
        attempts: int | None = None,
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
                descriptor that allows reading, and main memory at both ends. Its deadlines hold for the
                comparison too.
            drivers: names of the only drivers that may carry it; None: any that leads there.
            attempts: how many rounds through its rails each slice gets before the transfer fails; 1: no
                second try; None: as ``rails.attempts`` says.

        Raises ConfigError while it is running, for a write that is to be verified with a descriptor of
        access ``w``, and when a region to verify, at either end, is known to be no main memory; NoRoute when
        ``drivers`` has none that leads there; RegionClosed, EngineClosed.
        """
        if verify is not None:
            flag(verify, "verify")
        if self.remote._core is None:  # as for a new one: this end has given the region up
            self.remote._require_core()
        verified = self._engine._integrity is not None if verify is None else verify
        usual = priority == "normal" and deadline_s is None and notify is None and stream is None
        if usual and drivers is None and attempts is None and not verified:
            self.launch()
            return self
        options: LaunchOptions = {
            "priority": one_of(priority, "priority", ("high", "normal", "low")),
            "deadline_s": None if deadline_s is None else seconds(deadline_s, "deadline_s"),
            "notify": None if notify is None else _message(notify),
            "stream": _stream_handle(stream),
            "drivers": _names(drivers),
            "attempts": 0 if attempts is None else number(attempts, "attempts", least=1, most=MOST_ATTEMPTS),
        }
        if verified:
            self._engine._verifier.launch(self, options)
        else:
            self.launch(**options)
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

    def future(self) -> TransferFuture:
        """Return a future of this run: it gets None, or what ``wait()`` raises.

        Cancelling it does not cancel the transfer. Raises ConfigError before the first ``post()``.
        """
        if self.state == "prepared":
            self.wait(0.0)  # says so
        future = TransferFuture(self)
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
            fields = {"peer": self.remote.peer.address, "region": self.remote.name}
            self._engine._watcher.watch(self, ended, fields)
        return future

    def __await__(self) -> Generator[object, None, None]:
        """As ``wait_async()``, with the configuration's ``transfer_timeout_s``."""
        return self.wait_async().__await__()

    async def wait_async(self, timeout_s: float | None = None) -> None:
        """As ``wait()``, without blocking the event loop: ends the transfer when ``timeout_s`` has passed.

        Cancelling the awaiting task cancels the transfer. So does ``asyncio.wait_for``, whose TimeoutError
        says nothing by itself; ``timeout_s`` here makes it a TransferTimeout that names peer, rail and cause.
        """
        limit_s = self._engine._limit_s(timeout_s, self._engine.config.transfer_timeout_s)
        begun_s = time.monotonic()
        try:
            await asyncio.wait_for(self._until_done(), limit_s)
        except asyncio.TimeoutError:
            pass  # wait() below raises TransferTimeout, after it has cancelled
        except asyncio.CancelledError as error:
            if not error.args:  # what asyncio.wait_for() makes of it has this as its cause
                error.args = (self.overdue(round(time.monotonic() - begun_s, 3)),)
            self.cancel()
            raise
        # A cancelled transfer may take a moment to let go of the memory.
        until_s = time.monotonic() + CANCEL_GRACE_S
        while not self.done():
            if time.monotonic() >= until_s:
                raise MemoryInUse(
                    f"{self.overdue(limit_s)}; it cannot be ended, as a driver still uses its memory; "
                    "keep the memory and wait again"
                )
            self.expire(limit_s)  # again each time: an operation may just have moved to another driver
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._until_done(), CANCEL_AGAIN_S)
        self.wait()

    async def _until_done(self) -> None:
        if self.state != "running":
            return
        try:
            await self._until_signalled()
        except EngineForked:
            raise
        except (OSError, TransferError):  # no descriptor left: look now and then
            while not self.done():  # noqa: ASYNC110 - it is not asyncio that ends it
                await asyncio.sleep(LOOK_S)

    async def _until_signalled(self) -> None:
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        with event_descriptor() as signal:
            loop.add_reader(signal, _set_done, finished)
            try:
                self.signal_when_done(signal)
                await finished
            finally:
                loop.remove_reader(signal)


class TransferFuture(concurrent.futures.Future[None]):
    """What ``Transfer.future()`` returns: the standard future, whose timeouts say what they waited for."""

    def __init__(self, transfer: Transfer):
        super().__init__()
        self._transfer = transfer

    def result(self, timeout: float | None = None) -> None:
        """Return None once the transfer is done, or raise what made it fail.

        Raises TransferTimeout, naming peer, rail and cause, when it runs still after ``timeout`` seconds; it
        goes on, as with every future: ``Transfer.cancel()`` ends it.
        """
        with self._explained(timeout):
            super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what made the transfer fail, None for nothing; otherwise as ``result``."""
        with self._explained(timeout):
            return super().exception(timeout)

    @contextlib.contextmanager
    def _explained(self, timeout: float | None) -> Iterator[None]:
        if timeout is not None:
            seconds(timeout, "timeout")
        try:
            yield
        except concurrent.futures.TimeoutError as error:
            if timeout is None or self.done():  # how the transfer ended, not how this wait did
                raise
            reason = self._transfer.overdue(timeout)
            raise TransferTimeout(f"{reason}; it goes on, Transfer.cancel() ends it") from error


def _names(drivers: Sequence[str] | None) -> Sequence[str]:
    if drivers is None:
        return ()
    if not isinstance(drivers, list | tuple) or not drivers or not all(isinstance(n, str) for n in drivers):
        raise wrong("drivers", drivers, 'a list or tuple of names, for example ("tcp",)')
    for name in drivers:
        text(name, "a name of drivers")
    return drivers


def _message(notify: tuple[str, bytes]) -> tuple[str, bytes]:
    """Check it before a byte moves: it is sent only after the last one."""
    pair = isinstance(notify, tuple) and len(notify) == 2
    if not pair or not isinstance(notify[0], str) or not isinstance(notify[1], bytes):
        raise wrong("notify", notify, "a pair: the peer's method (str) and the payload (bytes)")
    method_name(notify[0], "the method of notify")
    if len(notify[1]) > MESSAGE_BYTES:
        raise ConfigError(
            f"the payload of notify has {len(notify[1])} bytes, more than the {MESSAGE_BYTES} of a message"
        )
    return notify


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _stream_handle(stream: object | None) -> int:
    """The native handle of a device stream: an int, or an object of torch, cupy or cuda.core."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return number(stream, "stream", least=0, most=LARGEST_HANDLE)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return number(protocol()[1], "stream", least=0, most=LARGEST_HANDLE)
    for attribute in ("cuda_stream", "npu_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return number(value, "stream", least=0, most=LARGEST_HANDLE)
    raise ConfigError(f"stream is {type(stream).__name__}; pass its integer handle or a CUDA stream object")
