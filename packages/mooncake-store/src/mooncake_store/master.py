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

from mooncake_store import protocol
from mooncake_store._errors import ConfigError, MasterUnreachable
from mooncake_store.config import StoreConfig
from mooncake_store.master_state import MasterState
from mooncake_store.members import Member
from mooncake_store.protocol import METHOD, Reply, Request, StoreStats, notice_method
from mooncake_transfer import Caller, TransferEngine
from mooncake_transfer.errors import TransferError

__all__ = ["Master", "master_of"]

LOCAL = 0  # the connection of clients in this process
TICK_S = 1.0
RING_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class Master:
    """Serves the store's metadata to clients of ``engine``'s channel, and to those in this process.
    Thread-safe.

    It holds no bytes and persists nothing: a new master starts empty, and clients come to it by themselves.
    Use it as a context manager, or call ``close()`` before the engine's.

    Attributes:
        engine: the engine it serves on.
        epoch: random number of this master; requests meant for an earlier one are refused.
    """

    def __init__(self, engine: TransferEngine, config: StoreConfig | None = None) -> None:
        """Start serving. Raises ConfigError when the engine serves another master already."""
        self.engine = engine
        self.epoch = secrets.randbits(63) | 1
        self._state = MasterState(self.epoch, config or StoreConfig())
        self._changed = threading.Condition()  # guards all below, and the state
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
        with self._changed:
            return self._state.stats()

    def call_local(self, request: Request, bell: Callable[[], None]) -> Reply:
        """Answer a client of this process. ``bell`` is called, and must not block, when notices wait for it.

        Raises MasterUnreachable when this master has been closed.
        """
        return self._handle(request, LOCAL, "", bell)

    def call_remote(self, request: Request, caller: Caller) -> Reply:
        """Answer a client that asks through the engine's channel. Raises MasterUnreachable after
        ``close()``.
        """
        return self._handle(request, caller.connection, caller.address, None)

    def lost(self, caller: Caller) -> None:
        """Take note that a connection of the engine has ended."""
        with self._changed:
            if not self._closed:
                self._state.on_connection_lost(caller.connection)
                self._collect_rings()

    def close(self) -> None:
        """Stop serving and end the thread. Clients get MasterUnreachable. Safe to call twice."""
        self._port.detach(self)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Master:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _handle(
        self, request: Request, connection: int, address: str, bell: Callable[[], None] | None
    ) -> Reply:
        with self._changed:
            if self._closed:
                raise MasterUnreachable("the master in this process has been closed")
            if isinstance(request, protocol.Mount) and bell is not None:
                self._bells[request.client] = bell
            try:
                reply = self._state.handle(request, connection, address, time.monotonic())
            except Exception:
                log.exception("request %s of %s failed", type(request).__name__, address or "a local client")
                raise
            if isinstance(request, protocol.Unmount):
                self._bells.pop(request.client, None)
            self._collect_rings()
            return reply

    def _collect_rings(self) -> None:
        for member in self._state.take_to_ring():
            bell = self._bells.get(member.client)
            if bell is not None:
                bell()
            else:
                self._to_ring.append(member)
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._to_ring, self._pause_s())
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


class _Port:
    """The place of the master on one engine; an engine never forgets a handler, masters come and go."""

    def __init__(self, engine: TransferEngine) -> None:
        self.master: Master | None = None
        self._lock = threading.Lock()
        engine.serve(METHOD, self._on_call)
        engine.on_peer_lost(self._on_lost)

    def attach(self, master: Master) -> None:
        with self._lock:
            if self.master is not None:
                raise ConfigError(
                    f"the engine at {master.engine.address} serves a store master already; close that "
                    f"one first, or give its address to Store()"
                )
            self.master = master

    def detach(self, master: Master) -> None:
        with self._lock:
            if self.master is master:
                self.master = None

    def _on_call(self, payload: bytes, caller: Caller) -> bytes:
        master = self.master
        if master is None:
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


def master_of(engine: TransferEngine) -> Master | None:
    """The master that this process serves on ``engine``, if any."""
    port = _ports.get(engine)
    return port.master if port is not None else None
