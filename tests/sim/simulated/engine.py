"""A transfer engine whose channel and wires are simulated: what the store uses of TransferEngine, no more."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from mooncake_transfer import Caller, MemoryKind, Region, TransferConfig
from mooncake_transfer.errors import (
    CallTimeout,
    EngineClosed,
    PeerRestarted,
    PeerUnreachable,
    RegionBusy,
    RemoteError,
)
from simulated.network import Connection, Network
from simulated.scheduler import Process, Task
from simulated.transfer import SimTransfer

__all__ = ["Descriptor", "SimEngine", "SimRegion"]

CONFIG = TransferConfig()
BUSY = 0.02  # of revocations
Handler = Callable[[bytes, Caller], bytes | None]


class Descriptor(msgspec.Struct, array_like=True, frozen=True):
    """What a peer needs to reach a region."""

    address: str
    epoch: int
    key: bytes
    nbytes: int


class SimRegion(Region):
    """Memory of a simulated process."""

    def __init__(self, engine: SimEngine, nbytes: int, name: str) -> None:
        self.engine = engine
        self.name = name
        self.nbytes = nbytes
        self.kind = MemoryKind.DRAM
        self.array = np.zeros(nbytes, dtype=np.uint8)
        self.key = engine.new_key()
        engine.keys[self.key] = self

    def view(self) -> memoryview:
        return memoryview(self.array)

    def descriptor(self, access: str = "rw") -> bytes:
        return self._describe(self.key) if access == "rw" else self.grant(access)

    def grant(self, access: str = "rw") -> bytes:
        key = self.engine.new_key()
        self.engine.keys[key] = self
        return self._describe(key)

    def ways(self, descriptor: bytes) -> frozenset[tuple[str, str]]:
        return frozenset({("sim", "")})

    def _describe(self, key: bytes) -> bytes:
        return msgspec.msgpack.encode(Descriptor(self.engine.address, self.engine.epoch, key, self.nbytes))

    def revoke(self, descriptor: bytes, timeout_s: float | None = None) -> None:
        key = msgspec.msgpack.decode(descriptor, type=Descriptor).key
        self.engine.keys.pop(key, None)
        self.engine.take_time()
        inside = any(inside == key and not process.dead for inside, process in self.engine.inside)
        if inside or self.engine.chance(BUSY):
            raise RegionBusy("somebody uses the region")

    def close(self, timeout_s: float | None = None, *, in_use: str = "wait") -> None:
        self.engine.keys = {key: region for key, region in self.engine.keys.items() if region is not self}


@dataclass(eq=False)
class RemoteRegion:
    """A region of a peer."""

    described: Descriptor
    peer: SimPeer
    kind: MemoryKind = MemoryKind.DRAM


class _Answer:
    """What a task waits for."""

    def __init__(self, engine: SimEngine) -> None:
        self.body: tuple[bool, Any] | None = None
        self.lost = False
        self._engine = engine
        self._task: Task | None = None

    def set(self, body: tuple[bool, Any]) -> None:
        self.body = body
        self._wake()

    def lose(self) -> None:
        self.lost = True
        self._wake()

    def _wake(self) -> None:
        if self._task is not None:
            self._engine.scheduler.wake(self._task)

    def wait(self, until_s: float) -> None:
        scheduler = self._engine.scheduler
        self._task = scheduler.here()
        while self.body is None and not self.lost and scheduler.now_s < until_s:
            scheduler.block(until_s)
        self._task = None


class SimPeer:
    """One incarnation of another engine."""

    def __init__(self, engine: SimEngine, connection: Connection) -> None:
        self.engine = engine
        self.connection = connection
        self.address = connection.server.address
        self.epoch = connection.server.epoch
        self.waiting: dict[int, _Answer] = {}

    @property
    def alive(self) -> bool:
        return not self.connection.client_knows

    def call(self, method: str, payload: bytes = b"", *, timeout_s: float | None = None) -> bytes:
        engine, connection = self.engine, self.connection
        engine.require_open()
        if not self.alive:
            raise PeerUnreachable(f"the connection to {self.address} is lost")
        until_s = engine.scheduler.true_s(5.0 if timeout_s is None else timeout_s)
        number, answer = next(engine.numbers), _Answer(engine)
        self.waiting[number] = answer

        def reply(failed: bool, body: Any) -> None:
            arrived = partial(self._arrived, number, (failed, body))
            engine.network.send(connection, 1, arrived)

        ask = partial(connection.server.asked, connection, method, bytes(payload), reply)
        engine.network.send(connection, 0, ask)
        answer.wait(until_s)
        self.waiting.pop(number, None)
        if answer.body is None:
            if answer.lost:
                raise PeerUnreachable(f"the connection to {self.address} was lost during {method!r}")
            raise CallTimeout(f"{method!r} of {self.address} was not answered in time")
        failed, body = answer.body
        if failed:
            raise RemoteError(body[0], body[1], f"{method!r} of {self.address}")
        return bytes(body)

    def _arrived(self, number: int, body: tuple[bool, Any]) -> None:
        process = self.engine.process
        if process.paused:
            process.waiting.append(partial(self._arrived, number, body))
        elif number in self.waiting:
            self.waiting[number].set(body)

    def notify(self, method: str, payload: bytes = b"", *, timeout_s: float | None = None) -> None:
        if not self.alive:
            raise PeerUnreachable(f"the connection to {self.address} is lost")
        ask = partial(self.connection.server.asked, self.connection, method, bytes(payload), None)
        self.engine.network.send(self.connection, 0, ask)


class SimEngine:
    """The engine of one process."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.network = network
        self.scheduler = network.scheduler
        self.process = process
        self.address = address
        self.epoch = self.scheduler.random.getrandbits(63) | 1
        self.config = CONFIG
        self.keys: dict[bytes, SimRegion] = {}
        self.inside: list[tuple[bytes, Process]] = []  # who copies to mapped memory, under which key
        self.numbers = itertools.count(1)
        self.closed = False
        self._handlers: dict[str, Handler] = {}
        self._on_lost: list[Callable[[Caller], None]] = []
        self._peers: dict[str, SimPeer] = {}
        self._connecting: set[str] = set()
        self._asked: deque[tuple[Connection, str, bytes, Callable[[bool, Any], None] | None]] = deque()
        self._busy: dict[Connection, int] = {}
        self._running = 0
        assert address not in network.engines, f"{address} is taken"
        network.engines[address] = self

    # ---- for the store

    def require_open(self) -> None:
        if self.closed:
            raise EngineClosed("the engine has been closed")

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    def serve_compiled(self, method: str, handler: object) -> None:
        """Compiled code does not run in simulated time; nobody asks for it here."""

    def on_peer_lost(self, handler: Callable[[Caller], None]) -> None:
        self._on_lost.append(handler)

    def allocate(self, nbytes: int, *, name: str = "", **_: object) -> SimRegion:
        self.require_open()
        return SimRegion(self, nbytes, name)

    def connect(self, address: str, *, timeout_s: float | None = None) -> SimPeer:
        self.require_open()
        until_s = self.scheduler.true_s(3.0 if timeout_s is None else timeout_s)
        while address in self._connecting and self.scheduler.now_s < until_s:
            self.scheduler.block(min(until_s, self.scheduler.now_s + 1e-3))
        peer = self._peers.get(address)
        if peer is not None and peer.alive:
            return peer
        self._connecting.add(address)
        try:
            self._peers[address] = peer = self._connect(address, until_s)
            return peer
        finally:
            self._connecting.discard(address)

    def _connect(self, address: str, until_s: float) -> SimPeer:
        scheduler, network = self.scheduler, self.network
        while True:
            scheduler.block(scheduler.now_s + 2 * network.latency_s())
            server = network.engines.get(address)
            if server is None or server.closed:
                raise PeerUnreachable(f"nobody listens at {address}")
            pair = (self.process, server.process)
            quiet = network.blocked(*pair) or network.blocked(*pair[::-1]) or server.process.paused
            if not quiet and scheduler.now_s <= until_s:
                return SimPeer(self, network.open(self, server))
            if scheduler.now_s >= until_s:
                raise PeerUnreachable(f"{address} does not answer")
            scheduler.block(min(until_s, scheduler.now_s + 0.05))

    def import_region(self, descriptor: bytes, *, timeout_s: float | None = None) -> RemoteRegion:
        found = msgspec.msgpack.decode(descriptor, type=Descriptor)
        peer = self.connect(found.address, timeout_s=timeout_s)
        if peer.epoch != found.epoch:
            raise PeerRestarted(f"another process answers at {found.address}")
        return RemoteRegion(found, peer)

    def rails(self) -> list[Any]:
        """None that stays within a host: all that is read is compared with its checksum."""
        return []

    def read(
        self, local: SimRegion, remote: RemoteRegion, blocks: Any, *, verify: bool | None = None
    ) -> SimTransfer:
        return SimTransfer(self, False, local, remote, blocks)

    def write(
        self, local: SimRegion, remote: RemoteRegion, blocks: Any, *, verify: bool | None = None
    ) -> SimTransfer:
        return SimTransfer(self, True, local, remote, blocks)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.network.on_death(self, silent=False)

    # ---- for the simulation

    def new_key(self) -> bytes:
        return self.scheduler.random.randbytes(16)

    def chance(self, probability: float) -> bool:
        return self.scheduler.random.random() < probability

    def take_time(self) -> None:
        self.scheduler.block(self.scheduler.now_s + self.network.latency_s())

    def asked(
        self,
        connection: Connection,
        method: str,
        payload: bytes,
        reply: Callable[[bool, Any], None] | None,
    ) -> None:
        """A message has arrived; a thread takes it when one is free."""
        self._busy[connection] = self._busy.get(connection, 0) + 1
        self._asked.append((connection, method, payload, reply))
        self._serve()

    def _serve(self) -> None:
        while self._asked and self._running < self.config.handler_threads and not self.process.dead:
            self._running += 1
            asked = self._asked.popleft()
            self.scheduler.spawn(self.process, f"{self.address} {asked[1]}", partial(self._answer, *asked))

    def _answer(
        self,
        connection: Connection,
        method: str,
        payload: bytes,
        reply: Callable[[bool, Any], None] | None,
    ) -> None:
        try:
            answer: tuple[bool, Any]
            try:
                answer = False, self._handle(connection, method, payload)
            except Exception as error:
                answer = True, (type(error).__name__, str(error))
            if reply is not None:
                reply(*answer)
        finally:
            self._running -= 1
            self._busy[connection] -= 1
            self._serve()

    def _handle(self, connection: Connection, method: str, payload: bytes) -> bytes | None:
        handler = self._handlers.get(method)
        if handler is None:
            raise LookupError(f"{self.address} has no handler of {method!r}")
        return handler(payload, self._caller(connection))

    @staticmethod
    def _caller(connection: Connection) -> Caller:
        return Caller(connection.number, connection.client.address, connection.client.epoch)

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection.client is self:
            connection.client_knows = True
            peer = self._peers.get(connection.server.address)
            if peer is not None and peer.connection is connection:
                for answer in list(peer.waiting.values()):
                    answer.lose()
        if connection.server is self:
            self.scheduler.spawn(self.process, f"{self.address} lost", partial(self._tell_lost, connection))

    def _tell_lost(self, connection: Connection) -> None:
        # After all of its calls were answered.
        while self._busy.get(connection):
            self.scheduler.block(self.scheduler.now_s + 1e-3)
        self._busy.pop(connection, None)
        for handler in self._on_lost:
            handler(self._caller(connection))
