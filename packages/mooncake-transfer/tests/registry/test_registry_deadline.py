"""No server, however slowly it answers, holds a caller beyond the deadline."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import RegistryUnavailable
from mooncake_transfer.registry import open_registry
from mooncake_transfer.registry.contract import Interruptible
from mooncake_transfer.registry.deadline import TimedRegistry
from mooncake_transfer.registry.finding import registries
from mooncake_transfer.registry.memory import MemoryRegistry
from mooncake_transfer.testing.fixtures import wait_until

TIMEOUT_S = 1.5
# What a busy machine may need beyond a deadline; far less than the servers below would take.
SLACK_S = 10.0
BEGINNINGS = {"http": b"HTTP/1.1 200 OK\r\nServer: ", "etcd": b"HTTP/1.1 200 OK\r\n\r\n", "redis": b"+"}


class Trickler:
    """Takes any question, begins an answer, and then sends a byte now and then for ever."""

    def __init__(self, beginning: bytes) -> None:
        self._beginning = beginning
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._trickle, args=(connection,))
                thread.start()
                self._threads.append(thread)

    def _trickle(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(self._beginning)
            while not self._stop.wait(0.1):
                connection.sendall(b"x")

    def close(self) -> None:
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepting, *self._threads):
            thread.join(10.0)


@pytest.fixture(params=sorted(BEGINNINGS))
def trickling_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with contextlib.closing(Trickler(BEGINNINGS[request.param])) as server:
        yield f"{request.param}://127.0.0.1:{server.port}"


def asking_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name in ("mooncake-registry", "mooncake-announcer")
    ]


def asking_engine(url: str, timeout_s: float, name: str = "") -> TransferEngine:
    """Of one driver, so that it waits for no process that probes others."""
    return TransferEngine(
        TransferConfig(registry=url, name=name, registry_timeout_s=timeout_s, drivers=("tcp",))
    )


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < seconds + SLACK_S


def test_a_server_that_trickles_holds_nobody_beyond_the_deadline_and_leaves_no_thread(
    trickling_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with within(TIMEOUT_S):
        engine = asking_engine(trickling_url, TIMEOUT_S, name="e")
    with contextlib.closing(engine):
        with within(TIMEOUT_S), pytest.raises(RegistryUnavailable, match="no answer within"):
            engine.connect("somebody")
        with within(TIMEOUT_S):
            engine.publish(engine.allocate(4096, name="kv"))
        with within(TIMEOUT_S):
            engine.close()
    wait_until(lambda: not asking_threads(), "no thread is left")
    assert not caplog.records


def test_the_callers_deadline_holds_while_the_registry_is_asked(trickling_url: str) -> None:
    with asking_engine(trickling_url, 60.0) as engine:
        for ask in (
            engine.connect,
            lambda name, timeout_s: engine.find_region(name + "/r", timeout_s=timeout_s),
        ):
            with within(0.3), pytest.raises(RegistryUnavailable, match=r"no answer within 0\.3 s"):
                ask("somebody", timeout_s=0.3)
        wait_until(lambda: not asking_threads(), "the questions are interrupted")


@pytest.mark.timeout(60)
def test_a_question_that_is_given_up_while_it_connects_ends_all_the_same(
    trickling_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registries()[trickling_url.partition(":")[0]].open(trickling_url, 30.0)
    resolve = socket.getaddrinfo
    assert isinstance(registry, Interruptible)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        registry.interrupt()
        return resolve(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", interrupted)
    with pytest.raises(RegistryUnavailable):
        registry.get("k")
    registry.close()


@pytest.mark.timeout(60)
def test_a_question_that_is_given_up_closes_its_connection_itself(
    trickling_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's close would let it wait for a number that is another file's by then."""
    registry = registries()[trickling_url.partition(":")[0]].open(trickling_url, 30.0)
    assert isinstance(registry, Interruptible)
    closers: list[threading.Thread] = []
    reads = threading.Event()
    receive, close = socket.socket.recv, socket.socket.close

    def receiving(connection: socket.socket, *arguments: int) -> bytes:
        reads.set()
        return receive(connection, *arguments)

    def closing(connection: socket.socket) -> None:
        closers.append(threading.current_thread())
        close(connection)

    def ask() -> None:
        with pytest.raises(RegistryUnavailable):
            registry.get("k")

    asking = threading.Thread(target=ask)
    monkeypatch.setattr(socket.socket, "recv", receiving)
    monkeypatch.setattr(socket.socket, "close", closing)
    asking.start()
    assert reads.wait(30.0)
    registry.interrupt()
    asking.join(30.0)
    assert asking in closers
    assert threading.current_thread() not in closers
    registry.close()


def test_closing_an_engine_ends_the_questions_of_its_other_threads(trickling_url: str) -> None:
    engine = asking_engine(trickling_url, 60.0)
    said: list[BaseException] = []

    def ask() -> None:
        try:
            engine.connect("somebody", timeout_s=60.0)
        except RegistryUnavailable as error:
            said.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: "mooncake-registry" in asking_threads(), "the question is asked")
    with within(0.0):
        engine.close()
        thread.join(10.0)
    assert "it was closed" in str(said[0])


class Slow(MemoryRegistry):
    """A registry of a plugin, which cannot be interrupted and answers when it is told to."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.go = threading.Event()
        self.closed = threading.Event()

    def get(self, key: str) -> bytes | None:
        self.go.wait(30.0)
        return super().get(key)

    def remove(self, entries: Mapping[str, bytes]) -> None:
        self.go.wait(30.0)

    def close(self) -> None:
        self.closed.set()


def test_a_client_that_was_given_up_is_closed_when_it_returns_and_another_asks_next() -> None:
    clients: list[Slow] = []

    def open_client() -> Slow:
        clients.append(Slow())
        return clients[-1]

    registry = TimedRegistry(open_client, 30.0)
    with pytest.raises(RegistryUnavailable, match=r"no answer within 0\.05 s"):
        registry.get("k", 0.05)
    assert not clients[0].closed.is_set()
    clients[0].go.set()
    assert clients[0].closed.wait(10.0)
    registry.end_within(0.1)
    with within(0.1), pytest.raises(RegistryUnavailable):
        registry.remove({"k": b""})
    assert len(clients) == 2
    with pytest.raises(RegistryUnavailable):
        registry.list("k")
    clients[1].go.set()
    assert clients[1].closed.wait(10.0)
    registry.close()
    with pytest.raises(RegistryUnavailable, match="it was closed"):
        registry.get("k")


def test_questions_are_answered_while_the_interpreter_ends_and_makes_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    registry = TimedRegistry(lambda: MemoryRegistry("ending"), 5.0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert registry.replace("k", None, b"1", 5.0)
    assert registry.get("k") == b"1"
    registry.remove({"k": b"1"})
    assert registry.get("k") is None
    registry.close()


def test_a_client_is_used_again_after_it_answered_in_time(shared_url: str) -> None:
    with contextlib.closing(open_registry(shared_url, 5.0)) as registry:
        assert registry.get("mooncake/nothing") is None
        first = registry._idle[0]
        assert registry.get("mooncake/nothing") is None
        assert registry._idle == [first]
