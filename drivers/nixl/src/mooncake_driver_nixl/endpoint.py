"""One endpoint: an agent of NIXL, and what the engine asks of it. All of it runs on one thread."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_driver_nixl.library import load
from mooncake_driver_nixl.options import NixlOptions, parse
from mooncake_driver_nixl.target import Region, Target
from mooncake_driver_nixl.wire import (
    VERSION,
    Ask,
    Grant,
    Hello,
    Line,
    Message,
    PeerAddress,
    Released,
    Withdrawn,
)
from mooncake_transfer.listening import bindable, is_wildcard, join_address
from mooncake_transfer.python_driver import (
    DriverFailure,
    EndpointCaps,
    EndpointMemory,
    Opcode,
    Operation,
    PythonEndpoint,
    StatusCode,
)

__all__ = ["NixlEndpoint"]

log = logging.getLogger(__name__)

BUSY_REST_S, IDLE_REST_S = 0.0, 0.001
BATCH_OPS = 256  # operations of one transfer of NIXL
BATCH_BYTES = 16 << 20
PREPARED = 64  # transfers that are kept to be posted again
ABANDONED_S = 2.0  # how long transfers of a lost peer are given to end by themselves
KNOCK_S = 0.2  # how long a peer's listener is given to answer when it is asked whether it is there yet


@dataclass(slots=True, eq=False)
class Connection:
    """A peer's endpoint. ``line`` is made anew by the next operation once it was lost.

    Attributes:
        active: transfers under way. While there are some, this side does not end the line: with it the peer
            would count its memory as unused.
        leaving: the engine has disconnected.
    """

    number: int
    address: bytes
    line: Line | None = None
    agents: set[str] = field(default_factory=set)
    active: int = 0
    leaving: bool = False


@dataclass(slots=True, eq=False)
class Remote:
    """A peer's region: not asked for, asked for, or granted."""

    number: int
    connection: Connection
    region_id: int
    key: bytes
    grant: Grant | None = None
    agent: str = ""
    asked_at: float = 0.0
    withdrawn: bool = False
    active: int = 0
    waiting: list[Operation] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Active:
    """A transfer of NIXL that is under way."""

    handle: Any
    name: tuple[object, ...]
    operations: list[Operation]
    remote: Remote
    lost: tuple[float, str] | None = None  # when and why its peer was lost


class NixlEndpoint(PythonEndpoint):
    """See PythonEndpoint; a peer's region is asked for by the first operation that names it."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._settings: NixlOptions = parse(options)
        self.caps = EndpointCaps(
            bandwidth=4_000_000_000, latency_ns=100_000, max_op_bytes=self._settings.max_op_bytes
        )
        if is_wildcard(self._settings.host):
            raise DriverFailure(
                StatusCode.INVALID,
                f"nixl option host is {self._settings.host}, which peers cannot connect to; name one address",
            )
        self._agent = self._open_agent()
        self._selector = selectors.DefaultSelector()
        try:
            self._target = Target(self._settings, self._selector, self._agent, self.count_refusal)
        except OSError as error:
            self._selector.close()
            where = join_address(self._settings.host, self._settings.port)
            raise DriverFailure(StatusCode.INVALID, f"cannot listen on {where}: {error}") from error
        self._regions: dict[int, Region] = {}
        self._connections: dict[int, Connection] = {}
        self._remotes: dict[int, Remote] = {}
        self._queue: deque[Operation] = deque()
        self._active: list[Active] = []
        self._prepared: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def _open_agent(self) -> Any:
        try:
            nixl = load()
        except ImportError as error:
            raise DriverFailure(StatusCode.UNSUPPORTED, str(error)) from error
        config = nixl.nixl_agent_config(enable_prog_thread=self._settings.progress_thread, backends=[])
        try:
            agent = nixl.nixl_agent(secrets.token_hex(8), config)
            agent.create_backend("UCX", {"ucx_error_handling_mode": self._settings.errors})
        except Exception as error:  # NIXL has exceptions of its own for each of its statuses
            raise DriverFailure(StatusCode.UNSUPPORTED, f"NIXL has no UCX backend here: {error!r}") from error
        return agent

    def address(self) -> bytes:
        """See PythonEndpoint."""
        return self._target.address

    # ---- own memory

    def register(self, registered: int, memory: EndpointMemory, key: bytes) -> bytes:
        """See PythonEndpoint."""
        self._regions[registered] = self._target.add(memory, key)
        return b""  # the owner tells the rest when it is asked

    def deregister(self, registered: int) -> bool:
        """See PythonEndpoint."""
        region = self._regions[registered]
        first, end = region.memory.address, region.memory.address + region.memory.length
        self._forget_prepared(lambda name: first <= name[2] < end)  # type: ignore[operator]
        if not self._target.remove(region):
            return False
        del self._regions[registered]
        return True

    def grant(self, registered: int, key: bytes, access: int) -> bytes:
        """See PythonEndpoint."""
        self._regions[registered].keys[key] = access
        return b""

    def revoke(self, registered: int, key: bytes | None) -> bool:
        """See PythonEndpoint."""
        return self._target.revoke(self._regions[registered], key)

    # ---- peers

    def connect(self, connection: int, address: bytes) -> None:
        """See PythonEndpoint."""
        self._connections[connection] = Connection(connection, address)

    def disconnect(self, connection: int) -> None:
        """See PythonEndpoint."""
        gone = self._connections.pop(connection)
        gone.leaving = True
        self._end(lambda operation: operation.connection == connection, StatusCode.CLOSED, "disconnected")
        if not gone.active:
            self._leave(gone)

    def _leave(self, connection: Connection) -> None:
        self._lose(connection, "the connection was closed", StatusCode.CLOSED)
        if connection.line is not None:
            connection.line.close()

    def import_key(
        self, remote: int, connection: int, region_id: int, key: bytes, length: int, blob: bytes
    ) -> None:
        """See PythonEndpoint."""
        if connection in self._connections:
            self._remotes[remote] = Remote(remote, self._connections[connection], region_id, key)

    def release_key(self, remote: int) -> None:
        """See PythonEndpoint."""
        found = self._remotes.pop(remote, None)
        if found is not None and found.grant is not None and not found.active:
            self._give_back(found)

    def _give_back(self, remote: Remote) -> None:
        if remote.grant is not None and remote.connection.line is not None:
            remote.connection.line.send(Released(remote.grant.lease))

    def _reach(self, connection: Connection) -> Line:
        """The line to a peer; a new one when there is none."""
        if connection.line is not None and connection.line.open:
            return connection.line
        peer = self._told(connection)
        where = join_address(peer.host, peer.port)
        try:
            family, target = bindable(peer.host, peer.port)  # as the peer did itself
            connected = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise DriverFailure(StatusCode.UNREACHABLE, f"cannot connect to {where}: {error}") from None
        connected.setblocking(False)
        connected.connect_ex(target)
        line = Line(
            self._selector,
            connected,
            lambda message: self._on_message(connection, message),
            lambda reason: self._lose(connection, reason, StatusCode.UNREACHABLE),
        )
        connection.line = line
        line.send(Hello(VERSION, peer.secret))
        if not line.open:  # a port nobody listens on is known at once on the same host
            raise DriverFailure(StatusCode.UNREACHABLE, f"nobody listens at {where}")
        return line

    @staticmethod
    def _told(connection: Connection) -> PeerAddress:
        try:
            return msgspec.msgpack.decode(connection.address, type=PeerAddress)
        except msgspec.MsgspecError as error:
            raise DriverFailure(
                StatusCode.UNREACHABLE, f"the peer's address is none of this driver: {error}"
            ) from None

    def _is_gone(self, connection: Connection) -> bool:
        """Whether nobody listens at the peer's address any more, so that its endpoint has ended."""
        peer = self._told(connection)
        try:
            socket.create_connection((peer.host, peer.port), KNOCK_S).close()
        except OSError:
            return True
        return False

    def _lose(self, connection: Connection, reason: str, code: StatusCode) -> None:
        """The peer has gone: what waits fails now, what is under way when NIXL has let go of it."""
        now = time.monotonic()
        for active in self._active:
            if active.remote.connection is connection and active.lost is None:
                active.lost = (now, reason)
        for remote in self._remotes.values():
            if remote.connection is connection:
                remote.grant, remote.asked_at, remote.withdrawn = None, 0.0, False
                waiting, remote.waiting = remote.waiting, []
                for operation in waiting:
                    self.finish(operation, code, reason)
        self._forget_prepared(lambda name: name[1] in connection.agents)
        others = [other.agents for other in self._connections.values() if other is not connection]
        for agent in connection.agents.difference(*others):
            with contextlib.suppress(Exception):  # NIXL may have dropped it by itself
                self._agent.remove_remote_agent(agent)
        connection.agents.clear()

    def _on_message(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Grant):
            remote = self._remotes.get(message.remote)
            if remote is not None and remote.connection is connection and remote.asked_at:
                self._granted(remote, message)
            elif message.lease and connection.line is not None:
                connection.line.send(Released(message.lease))
        elif isinstance(message, Withdrawn):
            for remote in self._remotes.values():
                if remote.grant is not None and remote.grant.lease == message.lease:
                    remote.withdrawn = True
                    if not remote.active:
                        self._withdraw(remote)
        elif connection.line is not None:
            connection.line.close("the peer said what only initiators say")

    def _granted(self, remote: Remote, grant: Grant) -> None:
        remote.asked_at = 0.0
        waiting, remote.waiting = remote.waiting, []
        if grant.reason:
            for operation in waiting:
                self.finish(operation, StatusCode.REFUSED, grant.reason)
            return
        remote.grant, remote.agent = grant, grant.agent
        if grant.agent == self._agent.name:  # NIXL knows itself, and refuses to be told of itself
            self._queue.extend(waiting)
            return
        try:
            self._agent.add_remote_agent(grant.metadata)
        except Exception as error:  # noqa: BLE001 - NIXL has exceptions of its own for each of its statuses
            for operation in waiting:
                self.finish(operation, StatusCode.UNREACHABLE, f"NIXL does not reach the peer: {error!r}")
            self._withdraw(remote)
            return
        remote.connection.agents.add(remote.agent)
        self._queue.extend(waiting)

    def _withdraw(self, remote: Remote) -> None:
        self._give_back(remote)
        remote.grant, remote.withdrawn = None, False

    # ---- operations

    def submit(self, operations: Sequence[Operation]) -> None:
        """See PythonEndpoint."""
        self._queue.extend(operations)

    def cancel(self, cookie: int) -> None:
        """See PythonEndpoint."""
        self._end(lambda operation: operation.cookie == cookie, StatusCode.CANCELLED, "it was cancelled")

    def _end(self, meant: Callable[[Operation], bool], code: StatusCode, reason: str) -> None:
        """End operations that nothing was begun of. Those under way are over soon, with their own result."""
        kept: deque[Operation] = deque()
        for operation in self._queue:
            if meant(operation):
                self.finish(operation, code, reason)
            else:
                kept.append(operation)
        self._queue = kept
        for remote in self._remotes.values():
            for operation in [operation for operation in remote.waiting if meant(operation)]:
                remote.waiting.remove(operation)
                self.finish(operation, code, reason)

    def progress(self) -> float:
        """See PythonEndpoint."""
        for key, events in self._selector.select(0):
            if key.fileobj in self._selector.get_map():  # one before it may have closed it
                key.data(events)
        self._target.drop_silent()
        self._fail_unanswered()
        self._active = [active for active in self._active if not self._is_over(active)]
        self._start_queued()
        if not self._settings.progress_thread:
            self._agent.update_notifs()  # lets UCX work
        return BUSY_REST_S if self._active or self._queue else IDLE_REST_S

    def _fail_unanswered(self) -> None:
        late = time.monotonic() - self._settings.answer_timeout_s
        for remote in self._remotes.values():
            if remote.asked_at and remote.asked_at < late:
                self._give_up(remote)
                return

    def _give_up(self, remote: Remote) -> None:
        reason = "the peer did not answer in time"
        connection = remote.connection
        if connection.line is not None and connection.line.open and not connection.active:
            connection.line.close(reason)  # ends what waits
            return
        remote.asked_at = 0.0  # a grant that comes yet is given back
        waiting, remote.waiting = remote.waiting, []
        for operation in waiting:
            self.finish(operation, StatusCode.UNREACHABLE, reason)

    def _start_queued(self) -> None:
        while self._queue and len(self._active) < self._settings.active_transfers:
            first = self._queue.popleft()
            try:
                remote = self._checked(first)
            except DriverFailure as failure:
                self.finish(first, failure.code, str(failure))
                continue
            if remote.grant is None:
                self._ask(remote, first)
                continue
            batch, total = [first], first.length
            while self._queue and len(batch) < BATCH_OPS:
                after = self._queue[0]
                same = after[:4] == first[:4]  # opcode, connection, local, remote
                if not same or total + after.length > BATCH_BYTES:
                    break
                try:
                    self._checked(after)
                except DriverFailure:
                    break  # it is told when it comes first
                batch.append(self._queue.popleft())
                total += after.length
            self._start(remote, batch)

    def _checked(self, operation: Operation) -> Remote:
        remote = self._remotes.get(operation.remote)
        local = self._regions.get(operation.local)
        if remote is None or local is None or operation.connection not in self._connections:
            raise DriverFailure(StatusCode.INVALID, "no such connection, local or remote memory")
        if operation.local_offset + operation.length > local.memory.length:
            raise DriverFailure(StatusCode.INVALID, "the range is not inside the local region")
        grant = remote.grant
        if grant is None:
            return remote
        if remote.withdrawn:
            raise DriverFailure(
                StatusCode.REFUSED, "the region was deregistered or its key revoked by its owner"
            )
        if not grant.access & (1 << operation.opcode):
            raise DriverFailure(StatusCode.REFUSED, "the key does not allow this direction")
        if operation.remote_offset + operation.length > grant.length:
            raise DriverFailure(
                StatusCode.REFUSED, f"the range is outside the region, which has {grant.length} bytes"
            )
        return remote

    def _ask(self, remote: Remote, operation: Operation) -> None:
        try:
            line = self._reach(remote.connection)
        except DriverFailure as failure:
            self.finish(operation, failure.code, str(failure))
            return
        remote.waiting.append(operation)
        if not remote.asked_at:
            remote.asked_at = time.monotonic()
            line.send(Ask(remote.number, remote.region_id, remote.key))

    def _start(self, remote: Remote, batch: list[Operation]) -> None:
        assert remote.grant is not None
        here = self._regions[batch[0].local].memory.address
        there = remote.grant.address
        opcode = "READ" if batch[0].opcode == Opcode.READ else "WRITE"
        local = [(here + operation.local_offset, operation.length, 0) for operation in batch]
        far = [(there + operation.remote_offset, operation.length, 0) for operation in batch]
        name = (opcode, remote.agent, here, remote.grant.lease, tuple(local), tuple(far))
        try:
            handle = self._prepared.pop(name, None) or self._agent.initialize_xfer(
                opcode,
                self._agent.get_xfer_descs(local, "DRAM"),
                self._agent.get_xfer_descs(far, "DRAM"),
                remote.agent,
            )
            self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001 - NIXL has exceptions of its own for each of its statuses
            for operation in batch:
                self.finish(operation, StatusCode.UNREACHABLE, f"NIXL: {error!r}")
            return
        remote.active += 1
        remote.connection.active += 1
        active = Active(handle, name, batch, remote)
        if not self._is_over(active):
            self._active.append(active)

    def _is_over(self, active: Active) -> bool:
        """Whether a transfer has ended; then its operations are finished."""
        try:
            state = self._agent.check_xfer_state(active.handle)
        except Exception as error:  # noqa: BLE001 - as in _start
            state, active.lost = "ERR", active.lost or (0.0, f"NIXL: {error!r}")
        if state == "PROC":
            if active.lost is None or time.monotonic() - active.lost[0] < ABANDONED_S:
                return False
            if not self._is_gone(active.remote.connection):
                # Nothing may land once an operation has failed: as long as the peer lives, NIXL has to say.
                active.lost = (time.monotonic(), active.lost[1])
                return False
            with contextlib.suppress(Exception):  # NIXL could not cancel it: its destructor tries again
                self._agent.release_xfer_handle(active.handle)
        connection = active.remote.connection
        active.remote.active -= 1
        connection.active -= 1
        failed = active.lost is not None or state != "DONE"
        for operation in active.operations:
            if failed:
                reason = active.lost[1] if active.lost else "NIXL reports an error"
                self.finish(operation, StatusCode.UNREACHABLE, reason)
            else:
                self.finish(operation)
        if not failed:
            self._keep(active)
        if active.remote.withdrawn and not active.remote.active:
            self._withdraw(active.remote)
        elif active.remote.number not in self._remotes and not active.remote.active:
            self._give_back(active.remote)
        if connection.leaving and not connection.active:
            self._leave(connection)
        return True

    def _keep(self, active: Active) -> None:
        """Keep a transfer to post it again, instead of the one that was not used for longest."""
        self._prepared[active.name] = active.handle
        if len(self._prepared) > PREPARED:
            self._release(self._prepared.popitem(last=False)[1])

    def _forget_prepared(self, meant: Callable[[tuple[object, ...]], bool]) -> None:
        for name in [name for name in self._prepared if meant(name)]:
            self._release(self._prepared.pop(name))

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # its agent has gone
            self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """See PythonEndpoint."""
        deadline = time.monotonic() + ABANDONED_S
        while self._active and time.monotonic() < deadline:
            self._active = [active for active in self._active if not self._is_over(active)]
        self._forget_prepared(lambda _: True)
        leaving = [active.remote.connection for active in self._active]  # the engine has forgotten some
        for connection in [*self._connections.values(), *leaving]:
            if connection.line is not None:
                connection.line.close()
            self._lose(connection, "the endpoint was closed", StatusCode.CLOSED)
        self._target.close()
        self._selector.close()
        del self._agent
