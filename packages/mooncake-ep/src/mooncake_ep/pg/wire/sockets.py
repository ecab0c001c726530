"""Links over plain TCP sockets: who waits for an operation waits for all of them, else a thread does."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_ep.pg.wire.frames import Kind, Lane, header
from mooncake_ep.pg.wire.greeting import GREETING, Address, Greeting, answer, dial, listening, tune
from mooncake_ep.pg.wire.links import Receiver
from mooncake_ep.pg.wire.neighbours import Lent
from mooncake_ep.pg.wire.stream import TURN_BYTES, Stream

__all__ = ["Identity", "SocketLinks"]

_BEAT_S = 0.1
_ASLEEP_S = 1.0  # a pause of this thread after which nobody else can be called silent
_OTHER_LANES_S = 1.0  # the control lane of a process that has gone ends that soon after the others
_CLOSING_S = 1.0
_PARKED_S = 0.005  # so long after a caller has done its work, the thread leaves it to the next one
_GREETING_S = 5.0


class _Peer:
    """A process that is connected as a rank."""

    def __init__(self, life: int, streams: list[Stream]) -> None:
        self.life = life
        self.streams = streams
        self.heard = time.monotonic()
        self.doubted = 0.0  # since when one of its lanes has ended


@dataclass
class Identity:
    """Who this process is: its rank and number, what only the group knows, where it is and what it lends."""

    rank: int
    life: int
    secret: bytes
    hosts: tuple[str, ...]
    lent: Lent


class SocketLinks:
    """`links.Links` over sockets. `lock` is the engine's."""

    def __init__(self, own: Identity, lock: threading.RLock, receiver: Receiver) -> None:
        self._own = own
        self._lock, self._receiver = lock, receiver
        self._peers: dict[int, _Peer] = {}
        self._greeted: dict[tuple[int, int], dict[Lane, socket.socket]] = {}
        self._strangers: dict[socket.socket, float] = {}
        self._dialling: set[int] = set()
        self._again: set[Stream] = set()  # to be read although nothing new may have come
        self._selector = selectors.DefaultSelector()
        self._listener = listening()
        self._port = int(self._listener.getsockname()[1])
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._looks = self._selecting = 0
        self._closing = self._pumping = False
        self._pumped, self._parked = 0.0, threading.Condition(lock)
        self._turned = self._next_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mooncake-pg-wire", daemon=True)
        self._thread.start()

    # What the engine asks.

    def send(self, rank: int, lane: Lane, head: bytes, payload: memoryview | bytes = b"") -> None:
        """See `Links`."""
        peer = self._peers.get(rank)
        if peer is None:
            return
        stream = peer.streams[lane]
        before = stream.sending
        # Whoever reads notices that the other end is gone, after what it sent.
        with contextlib.suppress(OSError):
            stream.send(head, payload)
        if stream.sending and not before:
            self._watch(stream)

    def resume(self, rank: int | None = None) -> None:
        """See `Links`."""
        for number, peer in self._peers.items():
            if rank is not None and number != rank:
                continue
            for stream in peer.streams:
                if stream.waits:
                    stream.waits = False
                    self._again.add(stream)
                    self._wake()

    def abandon(self, sink: memoryview) -> None:
        """See `Links`."""
        for peer in self._peers.values():
            peer.streams[Lane.DATA].divert(sink)
            peer.streams[Lane.DATA].retract()

    def cut(self, rank: int) -> None:
        """See `Links`."""
        peer = self._peers.pop(rank, None)
        if peer is None:
            return
        for stream in peer.streams:
            with contextlib.suppress(OSError):
                stream.flush()
            self._forget(stream)

    def life(self, rank: int) -> int:
        """See `Links`."""
        peer = self._peers.get(rank)
        return 0 if peer is None else peer.life

    def ranks(self) -> list[int]:
        """See `Links`."""
        return list(self._peers)

    def idle(self, rank: int, lane: Lane) -> bool:
        """See `Links`."""
        peer = self._peers.get(rank)
        return peer is None or not peer.streams[lane].sending

    def silent_s(self, rank: int) -> float:
        """See `Links`."""
        peer = self._peers.get(rank)
        return 0.0 if peer is None else time.monotonic() - peer.heard

    def look(self) -> int:
        """See `Links`."""
        self._wake()
        return self._looks

    def close(self) -> None:
        """See `Links`."""
        deadline = time.monotonic() + _CLOSING_S
        with self._lock:
            self._closing = True
            for peer in self._peers.values():
                for stream in peer.streams:
                    stream.connection.setblocking(True)
                    stream.connection.settimeout(max(deadline - time.monotonic(), 0.01))
                    with contextlib.suppress(OSError):
                        stream.flush()
            for rank in list(self._peers):
                self.cut(rank)
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_S)

    # Connecting.

    def renew(self, life: int) -> None:
        """See `Links`."""
        self._own.life = life

    def address(self) -> Address:
        """See `Links`."""
        return Address(self._own.life, self._own.hosts, self._port, self._own.lent)

    def connect(self, rank: int, address: Address, deadline: float) -> bool:
        """See `Links`. Of two that connect to each other at once, the higher rank's connection counts."""
        with self._lock:
            if self.life(rank) == address.life:
                return True
            self._dialling.add(rank)
        made = None
        try:
            made = dial(address, self._own.rank, self._own.life, self._own.secret, deadline)
        finally:
            with self._lock:
                self._dialling.discard(rank)
                if made is not None:
                    self._add(rank, address.life, made)
        return made is not None

    def _add(self, rank: int, life: int, made: list[socket.socket]) -> None:
        if rank in self._peers:
            self._lose(rank)
        streams = [Stream(connection, rank, lane) for connection, lane in zip(made, Lane, strict=True)]
        self._peers[rank] = _Peer(life, streams)
        for stream in streams:
            self._watch(stream)
        self._wake()
        self._receiver.linked(rank, life)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._strangers[connection] = time.monotonic()
                self._selector.register(connection, selectors.EVENT_READ, lambda c=connection: self._greet(c))

    def _greet(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        try:
            said = connection.recv(GREETING.size)  # one segment
        except OSError:
            said = b""
        greeting = Greeting.unpack(said, self._own.secret) if len(said) == GREETING.size else None
        if greeting is None or not self._welcome(greeting):
            with contextlib.suppress(OSError):
                connection.send(answer(self._own.life, accepted=False))
            connection.close()
            return
        tune(connection, greeting.lane)
        with contextlib.suppress(OSError):
            connection.send(answer(self._own.life, accepted=True))
        lanes = self._greeted.setdefault((greeting.rank, greeting.life), {})
        lanes[greeting.lane] = connection
        if len(lanes) == len(Lane):
            del self._greeted[greeting.rank, greeting.life]
            self._add(greeting.rank, greeting.life, [lanes[lane] for lane in Lane])

    def _welcome(self, greeting: Greeting) -> bool:
        if greeting.rank in self._dialling and self._own.rank > greeting.rank:
            return False
        return self.life(greeting.rank) != greeting.life and greeting.rank != self._own.rank

    # The thread.

    def pump(self, limit_s: float) -> bool:
        """See `Links`."""
        if self._pumping:
            return False
        self._pumping = True
        if self._selecting:
            self._wake()  # so that the thread of the links does not look for the same
        try:
            self._turn(limit_s)
        finally:
            self._pumping = False
            self._pumped = time.monotonic()
        return True

    def _run(self) -> None:
        with self._lock:
            while not self._closing:
                if self._pumping or time.monotonic() - self._pumped < _PARKED_S:
                    self._parked.wait(_PARKED_S)
                else:
                    self._turn(_BEAT_S)
            self._shut()

    def _turn(self, limit_s: float) -> None:
        """Wait for what comes, without the lock, and take it."""
        limit_s = 0.0 if self._again else min(max(self._next_beat - time.monotonic(), 0.0), limit_s)
        self._selecting += 1
        self._lock.release()
        try:
            ready = self._selector.select(limit_s)
        finally:
            self._lock.acquire()
            self._selecting -= 1
        now = time.monotonic()
        if now - self._turned > _ASLEEP_S:
            for peer in self._peers.values():
                peer.heard = now
        self._turned = now
        again, self._again = self._again, set()
        for stream in again:
            self._serve(stream, selectors.EVENT_READ)
        for key, events in ready:
            self._serve(key.data, events)
        self._looks += 1
        if now >= self._next_beat:
            self._beat(now)
            self._next_beat = now + _BEAT_S

    def _serve(self, what: Stream | Callable[[], None] | None, events: int) -> None:
        if what is None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        elif not isinstance(what, Stream):
            what()
        elif self._is_open(what):
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(OSError):
                    what.flush()
            if events & selectors.EVENT_READ:
                self._read(what)
            if self._is_open(what):
                self._watch(what)

    def _read(self, stream: Stream) -> None:
        try:
            taken = stream.read(self._receiver.place, self._receiver.arrived)
            if taken and self._is_open(stream):
                self._peers[stream.rank].heard = time.monotonic()
            if taken >= TURN_BYTES:
                self._again.add(stream)
        except OSError:
            stream.ended = True
        if not stream.ended or not self._is_open(stream):
            return
        if stream.lane is Lane.CONTROL:
            self._lose(stream.rank)
        elif self._peers[stream.rank].doubted == 0.0:
            self._peers[stream.rank].doubted = time.monotonic()

    def _lose(self, rank: int) -> None:
        """Tell of the end of a process, after what it sent."""
        peer = self._peers.pop(rank)
        for lane in (Lane.CONTROL, Lane.MESSAGES):
            stream = peer.streams[lane]
            with contextlib.suppress(OSError):
                while not stream.ended and stream.read(self._receiver.place, self._receiver.arrived):
                    pass
        for stream in peer.streams:
            self._forget(stream)
        self._receiver.lost(rank)

    def _beat(self, now: float) -> None:
        for rank, peer in list(self._peers.items()):
            if peer.doubted and now - peer.doubted > _OTHER_LANES_S:
                self._lose(rank)
            else:
                self.send(rank, Lane.CONTROL, header(Kind.BEAT))
        for connection, since in list(self._strangers.items()):
            if now - since > _GREETING_S:
                self._strangers.pop(connection)
                self._selector.unregister(connection)
                connection.close()

    def _is_open(self, stream: Stream) -> bool:
        peer = self._peers.get(stream.rank)
        return peer is not None and peer.streams[stream.lane] is stream

    def _watch(self, stream: Stream) -> None:
        """Wait for what this stream can do now."""
        reads = not stream.ended and not stream.waits
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if stream.sending else 0)
        known = self._selector.get_map().get(stream.connection)
        if known is None and events:
            self._selector.register(stream.connection, events, stream)
        elif known is not None and not events:
            self._selector.unregister(stream.connection)
        elif known is not None and known.events != events:
            self._selector.modify(stream.connection, events, stream)

    def _forget(self, stream: Stream) -> None:
        stream.ended = True
        if stream.connection.fileno() in self._selector.get_map():
            self._selector.unregister(stream.connection)
        with contextlib.suppress(OSError):
            stream.connection.shutdown(socket.SHUT_WR)
        stream.connection.close()

    def _wake(self) -> None:
        if self._selecting:
            with contextlib.suppress(OSError):  # it has been woken, or ends just now
                os.write(self._wake_write, b"w")

    def _shut(self) -> None:
        for connection in [
            *self._strangers,
            *(one for lanes in self._greeted.values() for one in lanes.values()),
        ]:
            connection.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
