"""Drivers in plain Python, for prototypes, tests, and libraries that have only a Python interface.

A driver subclasses PythonEndpoint; its plugin's ``load`` returns ``capsule(name, Endpoint)``. The engine
then calls it through the same C table as compiled drivers. Everything of an endpoint runs on one thread of
its own, so nothing in it needs a lock, and nothing in it may block: what takes time is begun, and looked at
again in ``progress``.
"""

from __future__ import annotations

import abc
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mooncake_transfer import _core

if TYPE_CHECKING:
    from mooncake_transfer._core import DriverAnswer, DriverMailbox

__all__ = [
    "DriverFailure",
    "EndpointCaps",
    "EndpointMemory",
    "Opcode",
    "Operation",
    "PythonEndpoint",
    "StatusCode",
    "capsule",
]

log = logging.getLogger(__name__)

LONGEST_REST_S = 0.5  # how soon the thread sees a deadline pass
RETRY_REST_S = 0.001  # between two looks whether memory is still in use


class StatusCode(enum.IntEnum):
    """``mc_status`` of the driver ABI."""

    OK = 0
    AGAIN = 1
    INVALID = 2
    UNSUPPORTED = 3
    NO_MEMORY = 4
    UNREACHABLE = 5
    REFUSED = 6
    CANCELLED = 7
    TIMEOUT = 8
    IO = 9
    CLOSED = 10


class Opcode(enum.IntEnum):
    """``mc_opcode`` of the driver ABI: READ is from remote memory to local."""

    READ = 0
    WRITE = 1


class DriverFailure(Exception):
    """What a method raises to tell the engine why it failed."""

    def __init__(self, code: StatusCode, reason: str) -> None:
        self.code = code
        super().__init__(reason)


class Operation(NamedTuple):
    """One operation, as ``mc_op`` of the driver ABI has it. Offsets and length are in bytes."""

    opcode: int
    connection: int
    local: int
    remote: int
    local_offset: int
    remote_offset: int
    length: int
    cookie: int


class EndpointMemory(NamedTuple):
    """Memory to register, as ``mc_memory`` of the driver ABI has it."""

    kind: int
    device: int
    address: int
    length: int
    fd: int
    fd_offset: int
    region_id: int
    numa_node: int


@dataclass(frozen=True, slots=True)
class EndpointCaps:
    """``mc_caps`` of the driver ABI.

    Attributes:
        same_host_only: it reaches only processes of this machine.
        kinds: memory kinds that it registers, a bit ``1 << MemoryKind`` for each.
        bandwidth: expected, in bytes per second.
        latency_ns: expected, of one small operation.
        max_op_bytes: the engine cuts longer operations; 0: no limit.
        alignment: of offsets and lengths.
    """

    same_host_only: bool = False
    kinds: int = 1
    bandwidth: int = 1_000_000_000
    latency_ns: int = 100_000
    max_op_bytes: int = 0
    alignment: int = 1


class PythonEndpoint(abc.ABC):
    """One endpoint: what a driver implements. See ``abi/mooncake_driver.h`` for what each function promises.

    Handles are given by the adapter: numbers that are never 0 and never given twice. A method that fails
    raises DriverFailure; any other exception counts as MC_IO and is logged.
    """

    caps = EndpointCaps()

    def __init__(self, options: Mapping[str, str]) -> None:
        """Open it. ``finish`` and ``wake`` work from the first call of another method on."""
        self.options = options
        self._mailbox: DriverMailbox | None = None

    @abc.abstractmethod
    def address(self) -> bytes:
        """What a peer needs to connect; asked for once."""

    @abc.abstractmethod
    def connect(self, connection: int, address: bytes) -> None:
        """Begin a connection. What fails shows in its operations."""

    @abc.abstractmethod
    def disconnect(self, connection: int) -> None:
        """End the connection's operations with CLOSED and forget it."""

    @abc.abstractmethod
    def register(self, registered: int, memory: EndpointMemory, key: bytes) -> bytes:
        """Register memory; return what a peer's ``import_key`` needs beside region id and key."""

    @abc.abstractmethod
    def deregister(self, registered: int) -> bool:
        """Refuse peers from now on; return whether none touches it any more. Called again until it is so."""

    @abc.abstractmethod
    def import_key(
        self, remote: int, connection: int, region_id: int, key: bytes, length: int, blob: bytes
    ) -> None:
        """Name a peer's region. What is wrong with it shows in its operations."""

    @abc.abstractmethod
    def release_key(self, remote: int) -> None:
        """Forget a peer's region."""

    @abc.abstractmethod
    def submit(self, operations: Sequence[Operation]) -> None:
        """Begin operations; each must reach ``finish`` exactly once, now or later."""

    def grant(self, registered: int, key: bytes, access: int) -> bytes:
        """Add a key with lesser rights; return what ``register`` would for it."""
        raise DriverFailure(StatusCode.UNSUPPORTED, "this driver has no keys with lesser rights")

    def revoke(self, registered: int, key: bytes | None) -> bool:
        """As ``deregister``, for one key, or for all of them. INVALID for a key that was never granted."""
        raise DriverFailure(StatusCode.UNSUPPORTED, "this driver cannot revoke a key alone")

    def fence(self, token: bytes) -> bool:
        """End what a peer's ``late_writes`` named; return whether nothing of it can land any more.

        Called again until it is so. What has gone already, or never was, is True. INVALID for a token that is
        malformed: it comes from the network. Only drivers that were made with ``fences`` are asked.
        """
        raise DriverFailure(StatusCode.UNSUPPORTED, "this driver promises that there are no late writes")

    @abc.abstractmethod
    def cancel(self, cookie: int) -> None:
        """Ask for an early end of the operations with this cookie."""

    def progress(self) -> float:
        """Go on with what was begun; return after how many seconds to be called again at the latest."""
        return LONGEST_REST_S

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. Operations that are under way are lost."""

    def finish(
        self,
        operation: Operation,
        code: StatusCode = StatusCode.OK,
        reason: str = "",
        *,
        moved: int | None = None,
    ) -> None:
        """Complete an operation. ``moved``: how many bytes; None: all of them when OK, else none."""
        done = moved if moved is not None else operation.length if code is StatusCode.OK else 0
        assert self._mailbox is not None
        self._mailbox.finish([(operation.cookie, done, operation.opcode, int(code), reason)])

    def late_writes(self, connection: int, token: bytes) -> None:
        """Say what may still carry bytes of this connection's writes that are over, for the peer's ``fence``.

        Before such a write is finished. The engine gives no write to another connection to that peer until
        the token is empty, which says that nothing can land any more. From any thread.
        """
        assert self._mailbox is not None
        self._mailbox.set_late_writes(connection, token)

    def wake(self) -> None:
        """Have ``progress`` called soon; from any thread."""
        assert self._mailbox is not None
        self._mailbox.wake()

    def count_refusal(self) -> None:
        """Count a request of a peer that was refused here, for the statistics."""
        assert self._mailbox is not None
        self._mailbox.count_refusal()


def capsule(
    name: str, endpoint: Callable[[Mapping[str, str]], PythonEndpoint], *, fences: bool = False
) -> object:
    """Return the driver's function table, for ``DriverInfo.load``. ``endpoint`` makes one from its options.

    Without ``fences`` the driver promises that nothing of a write lands once it is finished, whatever became
    of it. With it, endpoints call ``late_writes`` and have ``fence``: see "Late writes" in the driver ABI.

    Raises DriverUnavailable when this process has eight drivers in Python already.
    """

    def make(mailbox: DriverMailbox, options: Mapping[str, str]) -> None:
        made = endpoint(options)
        made._mailbox = mailbox
        caps = made.caps
        mailbox.open(
            made.address(),
            int(caps.same_host_only),
            caps.kinds,
            caps.bandwidth,
            caps.latency_ns,
            caps.max_op_bytes,
            caps.alignment,
        )
        threading.Thread(target=_Worker(mailbox, made).run, name=f"mc-{name}"[:15], daemon=True).start()

    return _core.python_driver(name, make, fences)


class _Row(NamedTuple):
    """What the mailbox holds of one call. What its kind does not need is 0 or empty."""

    kind: str
    answer: DriverAnswer | None
    handle: int
    other: int
    number: int
    length: int
    key: bytes | None
    blob: bytes
    memory: tuple[int, int, int, int, int, int, int, int] | None
    ops: list[tuple[int, int, int, int, int, int, int, int]] | None


class _Worker:
    """The thread of one endpoint."""

    def __init__(self, mailbox: DriverMailbox, endpoint: PythonEndpoint) -> None:
        self._mailbox = mailbox
        self._endpoint = endpoint
        self._waiting: list[_Row] = []  # calls that take their time, tried again until done or too late

    def run(self) -> None:
        """Serve until the endpoint is closed."""
        rest_s = LONGEST_REST_S
        while True:
            for fields in self._mailbox.take(rest_s):
                row = _Row(*fields)
                if row.kind == "close":
                    self._call(row, self._close)
                    return
                if row.kind in ("deregister", "revoke", "fence"):
                    self._waiting.append(row)
                else:
                    self._call(row, self._do)
            rest_s = self._progress()
            self._waiting = [row for row in self._waiting if not self._try(row)]
            if self._waiting:
                rest_s = min(rest_s, RETRY_REST_S)

    def _progress(self) -> float:
        try:
            return self._endpoint.progress()
        except Exception:  # a driver's fault must not end the thread that others wait for
            log.exception("progress of a driver failed")
            return LONGEST_REST_S

    def _close(self, _row: _Row) -> None:
        self._endpoint.close()

    def _do(self, row: _Row) -> bytes | None:
        endpoint = self._endpoint
        key = row.key or b""
        if row.kind == "submit":
            endpoint.submit([Operation(*fields) for fields in row.ops or ()])
        elif row.kind == "connect":
            endpoint.connect(row.handle, row.blob)
        elif row.kind == "disconnect":
            endpoint.disconnect(row.handle)
        elif row.kind == "register":
            assert row.memory is not None
            return endpoint.register(row.handle, EndpointMemory(*row.memory), key)
        elif row.kind == "grant":
            return endpoint.grant(row.handle, key, row.number)
        elif row.kind == "import":
            endpoint.import_key(row.handle, row.other, row.number, key, row.length, row.blob)
        elif row.kind == "release":
            endpoint.release_key(row.handle)
        else:
            endpoint.cancel(row.handle)
        return None

    def _call(self, row: _Row, do: Callable[[_Row], bytes | None]) -> None:
        code, reason, payload = StatusCode.OK, "", None
        try:
            payload = do(row)
        except DriverFailure as failure:
            code, reason = failure.code, str(failure)
        except Exception as error:  # a third party's code: what it raised is the reason that the engine gets
            log.exception("%s of a driver failed", row.kind)
            code, reason = StatusCode.IO, f"{type(error).__name__}: {error}"
        self._give(row, code, reason, payload or b"")

    def _try(self, row: _Row) -> bool:
        """Whether the call is over; then it was answered."""
        code, reason = StatusCode.OK, ""
        deadline_ns = row.number
        try:
            if row.kind == "revoke":
                done = self._endpoint.revoke(row.handle, row.key)
            elif row.kind == "fence":
                done = self._endpoint.fence(row.blob)
            else:
                done = self._endpoint.deregister(row.handle)
            if not done and deadline_ns > 0:
                if time.monotonic_ns() < deadline_ns:
                    return False
                code, reason = StatusCode.TIMEOUT, f"{row.kind}: it was not so at the deadline"
        except DriverFailure as failure:
            code, reason = failure.code, str(failure)
        except Exception as error:  # as in _call
            log.exception("%s of a driver failed", row.kind)
            code, reason = StatusCode.IO, f"{type(error).__name__}: {error}"
        self._give(row, code, reason, b"")
        return True

    def _give(self, row: _Row, code: StatusCode, reason: str, payload: bytes) -> None:
        if row.answer is not None:
            self._mailbox.give(row.answer, int(code), reason, payload)
