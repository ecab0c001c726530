"""A master: the state machine behind a transfer engine's channel, with a clock."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from mooncake_store import protocol
from mooncake_store._core import DeskLock, DeskPort, Tenure
from mooncake_store._errors import ConfigError, MasterNotLeading, MasterUnreachable
from mooncake_store.access import Gate, load_rules
from mooncake_store.config import StoreConfig
from mooncake_store.master.members import LOCAL, Member
from mooncake_store.master.state import MasterState
from mooncake_store.protocol import METHOD, Reply, Request, StoreReport, StoreStats, notice_method
from mooncake_store.protocol.express import EXPRESS_METHOD
from mooncake_transfer import Caller, TransferEngine
from mooncake_transfer.errors import TransferError

__all__ = ["Master", "Office", "master_of", "stand_by"]

TICK_S = 1.0
# A version has 48 bits, an epoch 20.
EPOCH_SHIFT = 28
RING_TIMEOUT_S = 1.0
# Of the 63 bits of an epoch that no cluster counts; the others are milliseconds, and last until 2109.
RANDOM_BITS = 21

log = logging.getLogger(__name__)


def new_epoch() -> int:
    """Of a master without a cluster: above those of masters that began before, as far as clocks agree, since
    epoch and version say together which record of a tier is younger; and like that of no other.
    """
    return time.time_ns() // 1_000_000 << RANDOM_BITS | secrets.randbits(RANDOM_BITS)


class Office(Protocol):
    """A leadership of a cluster, which ends."""

    @property
    def epoch(self) -> int:
        """Greater than that of every leadership before it."""

    @property
    def tenure(self) -> Tenure:
        """Held as long as nobody else can lead, for compiled code."""

    def held(self) -> bool:
        """Whether nobody else can lead yet."""

    def outranked(self, epoch: int) -> None:
        """Somebody has seen a higher epoch."""


class Master:
    """Serves the store's metadata to clients of ``engine``'s channel, and to those in this process.
    Thread-safe.

    It holds no bytes and persists nothing: clients come to a new master by themselves, and with ``recovery``
    owners tell it what their segments hold.
    Use it as a context manager, or call ``close()`` before the engine's.

    Attributes:
        engine: the engine it serves on.
        epoch: number of this master; requests meant for an earlier one are refused.
    """

    def __init__(
        self, engine: TransferEngine, config: StoreConfig | None = None, *, office: Office | None = None
    ) -> None:
        """Start serving, as the leader of a cluster with an ``office``.

        Raises ConfigError when the engine serves another master already.
        """
        self.engine = engine
        self._office = office
        self.epoch = office.epoch if office is not None else new_epoch()
        config = config or StoreConfig()
        # Later leaders' versions are above those of earlier ones.
        first_version = 1 if office is None else office.epoch << EPOCH_SHIFT
        self._state = MasterState(self.epoch, config, first_version)
        self._gate = _gate_of(engine, config)
        if self._gate is not None:
            self._state.context.confined = self._gate.confines
        if office is not None:
            self._state.context.desk.lead(office.tenure)
        self._lock = lock_of(self._state)  # guards all below, and the state
        self._closed = False
        self._bells: dict[int, Callable[[], None]] = {}
        self._to_ring: deque[Member] = deque()
        self._port = _port_of(engine)
        self._port.attach(self)
        self._thread = threading.Thread(target=self._run, name="mooncake-store-master", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` under which clients reach it."""
        return self.engine.address

    def stats(self) -> StoreStats:
        """The store's numbers."""
        with self._lock:
            return self._state.stats()

    def report(self, hot: int = 20) -> StoreReport:
        """Everything that is shown of the store, with so many of the most read objects."""
        with self._lock:
            return self._state.report(hot, time.monotonic())

    def call_local(self, request: Request, bell: Callable[[], None]) -> Reply:
        """Answer a client of this process. ``bell`` is called, and must not block, when notices wait for it.

        Raises MasterUnreachable when this master has been closed.
        """
        if isinstance(request, protocol.Authenticate):
            return protocol.Done()  # this process is the master's own
        return self._handle(request, LOCAL, "", bell)

    def call_remote(self, request: Request, caller: Caller) -> Reply:
        """Answer a client that asks through the engine's channel. Raises MasterUnreachable after
        ``close()``.
        """
        return self._handle(request, caller.connection, caller.address, None, caller)

    def _pass(self, request: Request, caller: Caller) -> bool:
        """Let a request in, or raise NotAuthorised; whether that is all there is to do."""
        gate = self._gate
        if isinstance(request, protocol.Authenticate):
            if gate is not None:
                gate.take_token(caller, request.token)
            return True
        if gate is not None:
            if isinstance(request, protocol.Mount):
                gate.admit(request, caller)
            else:
                gate.check(request, caller, self._state.own)
        return False

    def lost(self, caller: Caller) -> None:
        """Take note that a connection of the engine has ended."""
        with self._lock:
            if not self._closed:
                self._state.on_connection_lost(caller.connection)
                if self._gate is not None:
                    self._gate.forget(caller)
                self._collect_rings()

    def close(self) -> None:
        """Stop serving and end the thread. Clients get MasterUnreachable. Safe to call twice."""
        self._port.detach(self)
        with self._lock:
            self._closed = True
            self._lock.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Master:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _handle(
        self,
        request: Request,
        connection: int,
        address: str,
        bell: Callable[[], None] | None,
        caller: Caller | None = None,
    ) -> Reply:
        with self._lock:
            # Under the same hold as what follows: somebody else may ask in the name of the same client.
            if caller is not None and self._pass(request, caller):
                return protocol.Done()
            if self._closed:
                raise MasterUnreachable("the master in this process has been closed")
            self._require_office(request)
            if isinstance(request, protocol.Mount) and bell is not None:
                self._bells[request.client] = bell
            began_s, failed = time.monotonic(), True
            try:
                reply = self._state.handle(request, connection, address, began_s)
                failed = False
            except Exception:
                log.exception("request %s of %s failed", type(request).__name__, address or "a local client")
                raise
            finally:
                took_s = time.monotonic() - began_s
                self._state.context.latencies.observe(type(request).__name__, took_s, failed=failed)
            if isinstance(request, protocol.Unmount):
                self._bells.pop(request.client, None)
            self._collect_rings()
            # Last of all, because it may have been decided too late to count.
            self._require_office(request)
            return reply

    def _require_office(self, request: Request) -> None:
        office = self._office
        if office is None:
            return
        if isinstance(request, protocol.Mount) and request.epoch_seen > self.epoch:
            office.outranked(request.epoch_seen)
        if not office.held():
            raise MasterNotLeading(f"the leadership of epoch {self.epoch} is over")

    def _collect_rings(self) -> None:
        for member in self._state.take_to_ring():
            bell = self._bells.get(member.client)
            if bell is not None:
                bell()
            else:
                self._to_ring.append(member)
                self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._collect_rings()  # of the desk, which may have notified while nobody waited here
                if not self._closed and not self._to_ring:
                    self._lock.wait(self._pause_s())
                if self._closed:
                    return
                self._state.on_tick(time.monotonic())
                self._collect_rings()
                members = list(self._to_ring)
                self._to_ring.clear()
            for member in members:
                self._ring(member)

    def _pause_s(self) -> float:
        deadline_s = self._state.next_deadline_s()
        return TICK_S if deadline_s is None else min(TICK_S, max(0.0, deadline_s - time.monotonic()))

    def _ring(self, member: Member) -> None:
        # Only a bell, and it may be lost: the client fetches its notices with the next heartbeat at the
        # latest.
        try:
            peer = self.engine.connect(member.address, timeout_s=RING_TIMEOUT_S)
            peer.notify(notice_method(member.client))
        except TransferError as error:
            log.debug(
                "client %016x at %s was not told of its notices: %s", member.client, member.address, error
            )


def lock_of(state: MasterState) -> DeskLock:
    """The lock that its desk takes, too."""
    return state.context.desk.lock


def _gate_of(engine: TransferEngine, config: StoreConfig) -> Gate | None:
    if not config.access_file:
        return None
    return Gate(load_rules(config.access_file), encrypted=engine.config.tls is not None)


class _Port:
    """The place of the master on one engine; an engine never forgets a handler, masters come and go."""

    def __init__(self, engine: TransferEngine) -> None:
        self.master: Master | None = None
        self.standby: Callable[[], str] | None = None
        self._lock = threading.Lock()
        self._desk = DeskPort()
        engine.serve(METHOD, self._on_call)
        engine.serve_compiled(EXPRESS_METHOD, self._desk.handler())
        engine.on_peer_lost(self._on_lost)

    def attach(self, master: Master) -> None:
        with self._lock:
            if self.master is not None:
                raise ConfigError(
                    f"the engine at {master.engine.address} serves a store master already; close that "
                    f"one first, or give its address to Store()"
                )
            self.master = master
            self._desk.attach(master._state.context.desk)

    def detach(self, master: Master) -> None:
        with self._lock:
            if self.master is master:
                self.master = None
                self._desk.detach()

    def _on_call(self, payload: bytes, caller: Caller) -> bytes:
        master = self.master
        if master is None:
            standby = self.standby
            if standby is not None:
                raise MasterNotLeading(standby())
            raise MasterUnreachable("the store master of this process has been closed")
        return protocol.encode(master.call_remote(protocol.decode_request(payload), caller))

    def _on_lost(self, caller: Caller) -> None:
        master = self.master
        if master is not None:
            master.lost(caller)


_ports: weakref.WeakKeyDictionary[TransferEngine, _Port] = weakref.WeakKeyDictionary()
_ports_lock = threading.Lock()


def _port_of(engine: TransferEngine) -> _Port:
    with _ports_lock:
        port = _ports.get(engine)
        if port is None:
            port = _ports[engine] = _Port(engine)
        return port


def stand_by(engine: TransferEngine, explain: Callable[[], str] | None) -> None:
    """While no master serves on ``engine``, tell clients why: it does not lead. None: no more."""
    _port_of(engine).standby = explain


def master_of(engine: TransferEngine) -> Master | None:
    """The master that this process serves on ``engine``, if any."""
    port = _ports.get(engine)
    return port.master if port is not None else None
