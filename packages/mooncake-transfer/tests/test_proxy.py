"""The fault proxy does to connections what it says, and leaves nothing behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mooncake_transfer.testing import FaultProxy
from mooncake_transfer.testing.fixtures import wait_until

HOST = "127.0.0.1"
DEADLINE_S = 10.0


class Echo:
    """A server that sends back what it gets, one connection after another."""

    def __init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self.ended: list[str] = []
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                try:
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)
                    self.ended.append("closed")
                except ConnectionResetError:
                    self.ended.append("reset")

    def close(self) -> None:
        if self.thread.is_alive():
            self.listener.shutdown(socket.SHUT_RDWR)
            self.thread.join(DEADLINE_S)
            self.listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(HOST, echo.port, host=HOST) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connected(proxy) as client:
        yield client


def connected(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=DEADLINE_S)


def exchange(client: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    received = b""
    while len(received) < len(data):
        part = client.recv(1 << 16)
        if not part:
            break
        received += part
    sender.join(DEADLINE_S)
    return received


def test_bytes_and_ends_are_forwarded_as_they_are(
    client: socket.socket, proxy: FaultProxy, echo: Echo
) -> None:
    data = bytes(range(256)) * 4096
    assert exchange(client, data) == data
    assert proxy.forwarded_bytes >= 2 * len(data) - (1 << 17)
    assert proxy.connections == 1
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    wait_until(lambda: proxy.connections == 0, "the connection is gone")
    assert echo.ended == ["closed"]


def test_a_delay_holds_back_each_way_and_costs_no_bandwidth(client: socket.socket, proxy: FaultProxy) -> None:
    proxy.delay(0.1)
    data = bytes(1 << 20)

    def exchanged_in_s() -> float:
        began = time.monotonic()
        assert exchange(client, data) == data
        return time.monotonic() - began

    # One after another, its 16 chunks would always need that; a machine that pauses does so only at times.
    taken_s = [exchanged_in_s()]
    while taken_s[-1] >= 16 * 0.2 and len(taken_s) < 5:
        taken_s.append(exchanged_in_s())
    assert 0.2 <= min(taken_s) < 16 * 0.2


def test_a_throttle_is_an_upper_limit(client: socket.socket, proxy: FaultProxy) -> None:
    proxy.throttle(1 << 20)
    data = bytes(1 << 17)
    began = time.monotonic()
    assert exchange(client, data) == data
    assert time.monotonic() - began >= 0.24  # both directions count


def test_a_corrupted_piece_has_one_wrong_bit(client: socket.socket, proxy: FaultProxy) -> None:
    proxy.corrupt()
    answer = exchange(client, bytes(1000))
    assert sum(byte.bit_count() for byte in answer) == 1
    assert exchange(client, bytes(1000)) == bytes(1000)


def test_a_stalled_connection_is_half_open_until_it_heals(
    client: socket.socket, proxy: FaultProxy, echo: Echo
) -> None:
    assert exchange(client, b"before") == b"before"
    proxy.stall()
    client.sendall(b"during")
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    assert proxy.connections == 1
    assert not echo.ended
    proxy.heal()
    client.settimeout(DEADLINE_S)
    assert client.recv(6) == b"during"


def test_a_reset_ends_connections_that_are_and_not_those_to_come(
    client: socket.socket, proxy: FaultProxy, echo: Echo
) -> None:
    assert exchange(client, b"before") == b"before"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    wait_until(lambda: echo.ended == ["reset"], "the other end sees it, too")
    with connected(proxy) as later:
        assert exchange(later, b"after") == b"after"


def test_a_cut_turns_new_connections_away_until_it_heals(client: socket.socket, proxy: FaultProxy) -> None:
    assert exchange(client, b"before") == b"before"
    proxy.cut()
    assert client.recv(1) == b""
    with connected(proxy) as turned_away:
        assert turned_away.recv(1) == b""
    proxy.heal()
    with connected(proxy) as later:
        assert exchange(later, b"after") == b"after"


def test_a_target_that_does_not_listen_ends_the_connection(proxy: FaultProxy, echo: Echo) -> None:
    echo.close()
    with connected(proxy) as client:
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            return


def test_closing_ends_every_connection_and_the_thread(echo: Echo) -> None:
    before = threading.active_count()
    proxy = FaultProxy(HOST, echo.port, host=HOST)
    with connected(proxy) as client:
        assert exchange(client, b"x") == b"x"
        proxy.stall()
        proxy.close()
        proxy.close()
        assert client.recv(1) == b""
    assert threading.active_count() == before
