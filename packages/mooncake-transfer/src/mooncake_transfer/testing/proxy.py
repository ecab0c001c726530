"""A TCP proxy that delays, throttles, spoils, stalls, resets and cuts what it forwards.

The channel and the tcp driver of an engine listen at addresses of their own, so an engine whose peers shall
come through proxies needs two of them::

    with FaultProxy() as channel, FaultProxy() as data:
        with TransferEngine(proxied_config(channel, data)) as owner:
            data.throttle(bytes_per_s=1 << 20)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from mooncake_transfer.config import TransferConfig

__all__ = ["FaultProxy", "proxied_config"]

Result = TypeVar("Result")

# Both are this machine: Linux gives all of 127.0.0.0/8 to the loopback interface.
INNER_HOST, OUTER_HOST = "127.0.0.2", "127.0.0.3"
CHUNK_BYTES = 64 << 10
CHUNKS_HELD = 256  # of one direction of a connection, between arriving and leaving
CHUNKS_PER_S = 50  # how smooth a throttled connection is
BACKLOG = 128
ANSWER_S = 10.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds


class FaultProxy:
    """Forwards connections to one address and does to them what a test asks for. A context manager.

    Thread-safe. Its one thread sleeps while nothing happens. Every fault holds for connections that exist and
    for later ones, until ``heal()``.

    Attributes:
        host: where it listens.
        port: where it listens.
        target: host and port it forwards to.
    """

    def __init__(
        self,
        target_host: str = INNER_HOST,
        target_port: int | None = None,
        *,
        host: str = OUTER_HOST,
    ) -> None:
        """Listen on any free port of ``host``. ``target_port``: None means that of the proxy."""
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self.target = (target_host, self.port if target_port is None else target_port)
        self._loop = asyncio.new_event_loop()
        self._connections: dict[asyncio.Task[None], tuple[socket.socket, socket.socket]] = {}
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._free_at_s = 0.0
        self._refusing = False
        self._spoil_next = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._forwarded = 0
        self._acceptor = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name=f"fault proxy {self.port}", daemon=True)
        self._thread.start()

    # ---- what a test does

    def delay(self, seconds: float) -> None:
        """Hold every byte back for so long, in each direction; it costs no bandwidth."""
        self._do(lambda: setattr(self, "_delay_s", seconds))

    def throttle(self, bytes_per_s: float) -> None:
        """Forward at most so much, of all connections and both directions together; 0: no limit."""
        self._do(lambda: setattr(self, "_bytes_per_s", bytes_per_s))

    def corrupt(self, chunks: int = 1) -> None:
        """Flip a bit in the middle of each of the next ``chunks`` pieces that are forwarded."""
        self._do(lambda: setattr(self, "_spoil_next", chunks))

    def stall(self) -> None:
        """Forward nothing, neither bytes nor ends of connections: all of them are half-open."""
        self._do(self._flowing.clear)

    def cut(self) -> None:
        """End every connection and turn away new ones."""
        self._do(lambda: self._end(refuse=True, reset=False))

    def reset(self) -> None:
        """End every connection with a reset (RST); new ones are forwarded."""
        self._do(lambda: self._end(refuse=self._refusing, reset=True))

    def heal(self) -> None:
        """Undo every fault. Connections that were ended stay so; what was stalled goes on."""

        def heal() -> None:
            self._delay_s = self._bytes_per_s = 0.0
            self._refusing, self._spoil_next = False, 0
            self._flowing.set()

        self._do(heal)

    @property
    def connections(self) -> int:
        """How many connections it forwards now."""
        return self._do(lambda: len(self._connections))

    @property
    def forwarded_bytes(self) -> int:
        """How much it has forwarded so far, both directions together."""
        return self._do(lambda: self._forwarded)

    def close(self) -> None:
        """End every connection and the thread. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._acceptor.cancel)
            self._thread.join(ANSWER_S)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- on its own thread

    def _do(self, action: Callable[[], Result]) -> Result:
        async def act() -> Result:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(ANSWER_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._acceptor)
            self._loop.run_until_complete(self._gone())
        finally:
            self._listener.close()
            self._loop.close()

    async def _gone(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._listener)
            if self._refusing:
                near.close()
                continue
            far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._connect(near, far))
            self._connections[task] = (near, far)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        for end in self._connections.pop(task):
            end.close()

    async def _connect(self, near: socket.socket, far: socket.socket) -> None:
        # One end that fails or is reset ends the other one, too: what else could a proxy tell it.
        with contextlib.suppress(OSError):
            await self._loop.sock_connect(far, self.target)
            await _both(self._forward(near, far), self._forward(far, near))

    async def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_HELD)
        await _both(self._receive(source, held), self._send(sink, held))

    async def _receive(self, source: socket.socket, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"first"
        while data:
            await self._flowing.wait()
            data = await self._loop.sock_recv(source, self._chunk_bytes())
            await held.put((self._loop.time() + self._delay_s, data))

    async def _send(self, sink: socket.socket, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        while True:
            due_s, data = await held.get()
            await self._sleep_until(due_s)
            await self._flowing.wait()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            if self._bytes_per_s:
                now_s = self._loop.time()
                self._free_at_s = max(self._free_at_s, now_s) + len(data) / self._bytes_per_s
                await self._sleep_until(self._free_at_s)
            await self._loop.sock_sendall(sink, self._spoilt(data))
            self._forwarded += len(data)

    def _chunk_bytes(self) -> int:
        if not self._bytes_per_s:
            return CHUNK_BYTES
        return max(1, min(CHUNK_BYTES, int(self._bytes_per_s / CHUNKS_PER_S)))

    def _spoilt(self, data: bytes) -> bytes:
        if not self._spoil_next:
            return data
        self._spoil_next -= 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]

    async def _sleep_until(self, due_s: float) -> None:
        if (left_s := due_s - self._loop.time()) > 0:
            await asyncio.sleep(left_s)

    def _end(self, *, refuse: bool, reset: bool) -> None:
        self._refusing = refuse
        for task, ends in list(self._connections.items()):
            if reset:
                for end in ends:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            task.cancel()


async def _both(one: Any, other: Any) -> None:
    """Run both to their end; when one fails, end the other and raise."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def proxied_config(
    channel: FaultProxy, data: FaultProxy, *, tcp: dict[str, Any] | None = None, **settings: Any
) -> TransferConfig:
    """Return settings of an engine that peers reach through two proxies only, by tcp.

    Both proxies are as they come: at OUTER_HOST, with their own port at INNER_HOST as the target. ``tcp``:
    options of the tcp driver; ``settings``: other fields of TransferConfig.
    """
    options: dict[str, Any] = {"host": INNER_HOST, "advertise_host": data.host, "port_min": data.port}
    return TransferConfig(
        drivers=("tcp",),
        driver_options={"tcp": {**options, **(tcp or {})}},
        host=INNER_HOST,
        advertise_host=channel.host,
        port=channel.port,
        **settings,
    )
