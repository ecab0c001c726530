"""Channels, and strangers that speak the channel's frames by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mooncake_transfer._core import Channel
from mooncake_transfer.errors import PeerUnreachable

DEADLINE_S = 10.0
HEADER = struct.Struct("<IBBHQ")
HELLO, HELLO_ACK, REQUEST, REPLY, ERROR, NOTIFY, REFUSE = range(1, 8)


def frame(kind: int, body: bytes = b"", method: bytes = b"", request: int = 0, version: int = 1) -> bytes:
    """One frame as it travels."""
    return HEADER.pack(len(body), version, kind, len(method), request) + method + body


class Stranger:
    """A plain socket that sends and reads frames."""

    HELLO, HELLO_ACK, REQUEST, REPLY, ERROR, NOTIFY, REFUSE = range(1, 8)

    def __init__(self, connected: socket.socket):
        self.socket = connected
        self.socket.settimeout(DEADLINE_S)

    def send(self, kind: int, body: bytes = b"", method: bytes = b"", request: int = 0) -> None:
        """Send one frame."""
        self.socket.sendall(frame(kind, body, method, request))

    def read(self) -> tuple[int, int, bytes] | None:
        """Type, request and body of the next frame; None when the other side has ended the connection."""
        head = self._read(HEADER.size)
        if head is None:
            return None
        length, _, kind, method_length, request = HEADER.unpack(head)
        return kind, request, (self._read(method_length + length) or b"")[method_length:]

    def greet(self) -> None:
        """Say hello and wait for the answer."""
        self.send(HELLO, b"stranger", request=1)
        answer = self.read()
        assert answer is not None
        assert answer[0] == HELLO_ACK, answer

    def read_until_the_end(self) -> list[tuple[int, int, bytes]]:
        """Every frame that still comes before the other side ends the connection."""
        frames = []
        with contextlib.suppress(ConnectionResetError):
            while (got := self.read()) is not None:
                frames.append(got)
        return frames

    def _read(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                return None
            data += chunk
        return data


@pytest.fixture
def open_channel() -> Iterator[Callable[..., Channel]]:
    """Start a channel that listens; keywords are its limits, ``tls`` what ``use_tls`` takes."""
    with ExitStack() as opened:

        def open_channel(
            hello: bytes = b"channel",
            *,
            host: str = "127.0.0.1",
            tls: tuple[str, str, str, bool] | None = None,
            **limits: Any,
        ) -> Channel:
            channel = Channel(**limits)
            opened.callback(channel.close)
            if tls is not None:
                channel.use_tls(*tls)
            channel.listen(host, 0)
            channel.start(hello)
            return channel

        yield open_channel


@pytest.fixture
def stranger() -> Iterator[Callable[[Channel], Stranger]]:
    """Connect to a channel without being one."""
    with ExitStack() as opened:

        def connect(channel: Channel) -> Stranger:
            connected = socket.create_connection(("127.0.0.1", channel.port), DEADLINE_S)
            return Stranger(opened.enter_context(connected))

        yield connect


@pytest.fixture
def strange_server() -> Iterator[Callable[[Channel], tuple[int, Stranger]]]:
    """Let a channel connect to a stranger that greets; gives the connection and the stranger."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def accept(channel: Channel) -> tuple[int, Stranger]:
            accepted: list[Stranger] = []

            def greet() -> None:
                server = Stranger(opened.enter_context(listener.accept()[0]))
                accepted.append(server)
                hello = server.read()
                assert hello is not None
                server.send(HELLO_ACK, b"server", request=hello[1])

            thread = threading.Thread(target=greet)
            thread.start()
            connection, _ = channel.connect("127.0.0.1", listener.getsockname()[1], DEADLINE_S)
            thread.join(DEADLINE_S)
            return connection, accepted[0]

        yield accept


@pytest.fixture
def answering() -> Iterator[Callable[[Channel], None]]:
    """Have a channel answer every request with its body reversed; method ``fail`` fails."""
    ends: list[Callable[[], None]] = []

    def answer(channel: Channel) -> None:
        stopping = threading.Event()

        def run() -> None:
            while not stopping.is_set():
                item = channel.next_request(0.05)
                if item is not None:
                    _, connection, request, method, body = item
                    with contextlib.suppress(PeerUnreachable):  # it has gone meanwhile
                        channel.reply(connection, request, method == "fail", body[::-1])

        thread = threading.Thread(target=run)
        thread.start()
        ends.append(lambda: (stopping.set(), thread.join(DEADLINE_S))[0])

    yield answer
    for end in ends:
        end()
