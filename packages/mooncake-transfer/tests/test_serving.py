"""Handlers of ``serve()`` and ``on_peer_lost()``: whatever one of them does, the others are served."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mooncake_transfer import Peer, TransferConfig, TransferEngine
from mooncake_transfer._serving import Reply
from mooncake_transfer.errors import ConfigError, RemoteError
from mooncake_transfer.peer import Caller
from mooncake_transfer.testing.fake import FakeFabric

DEADLINE_S = 20.0


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


FAILURES = [
    SystemExit(3),
    asyncio.CancelledError(),
    KeyboardInterrupt(),
    GeneratorExit(),
    Unspeakable(),
    ValueError("\udc80"),
]


class Served:
    """An engine, and a peer of it that asks."""

    def __init__(self, stack: ExitStack) -> None:
        self.fabric = stack.enter_context(FakeFabric())
        self.engine = stack.enter_context(TransferEngine(self.fabric.config("there", handler_threads=1)))
        self.asking = stack.enter_context(TransferEngine(self.fabric.config("here")))
        self.peer: Peer = self.asking.connect(self.engine.address)


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    # What is logged of these failures holds text that no report of a test can carry between processes.
    caplog.set_level(logging.CRITICAL + 1, logger="mooncake_transfer")
    with ExitStack() as stack:
        yield Served(stack)


def failing(error: BaseException) -> Callable[[bytes, Caller], bytes]:
    def handler(payload: bytes, caller: Caller) -> bytes:
        raise error

    return handler


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_whatever_a_handler_raises_is_told_and_the_next_call_is_answered(
    served: Served, error: BaseException
) -> None:
    served.engine.serve("fail", failing(error))
    served.engine.serve("echo", lambda payload, caller: payload)
    for _ in range(2):
        with pytest.raises(RemoteError) as caught:
            served.peer.call("fail", timeout_s=DEADLINE_S)
        assert caught.value.kind == type(error).__name__
    assert served.peer.call("echo", b"still here", timeout_s=DEADLINE_S) == b"still here"


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_whatever_a_handler_of_notifications_raises_the_next_one_is_handled(
    served: Served, error: BaseException
) -> None:
    heard = threading.Event()
    served.engine.serve("fail", failing(error))
    served.engine.serve("hear", lambda payload, caller: heard.set())
    served.peer.notify("fail")
    served.peer.notify("hear")
    assert heard.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (5, "handler of 'wrong' returned int 5; it must return bytes or None"),
        (0, "returned int 0;"),
        ("", "returned str '';"),
        ([], "returned list [];"),
        (False, "returned bool False;"),
    ],
)
def test_a_reply_that_is_no_bytes_is_told_with_what_it_is(served: Served, reply: object, told: str) -> None:
    served.engine.serve("wrong", lambda payload, caller: reply)  # type: ignore[arg-type,return-value]
    with pytest.raises(RemoteError) as caught:
        served.peer.call("wrong", timeout_s=DEADLINE_S)
    assert caught.value.kind == "TypeError"
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "got"),
    [(None, b""), (b"", b""), (bytearray(b"abc"), b"abc"), (memoryview(b"abcdef")[::2], b"ace")],
)
def test_a_reply_is_none_or_whatever_holds_bytes(served: Served, reply: Reply, got: bytes) -> None:
    served.engine.serve("right", lambda payload, caller: reply)
    assert served.peer.call("right", timeout_s=DEADLINE_S) == got


def test_whatever_a_handler_of_lost_peers_raises_the_others_and_the_next_event_are_handled(
    served: Served,
) -> None:
    lost, heard = threading.Event(), threading.Event()

    def fail(caller: Caller) -> None:
        raise SystemExit(3)

    served.engine.on_peer_lost(fail)
    served.engine.on_peer_lost(lambda caller: lost.set())
    served.engine.serve("hear", lambda payload, caller: heard.set())
    with TransferEngine(served.fabric.config("visitor")) as visitor:
        visitor.connect(served.engine.address)
    assert lost.wait(DEADLINE_S)
    served.peer.notify("hear")
    assert heard.wait(DEADLINE_S)


def test_whatever_a_callback_of_a_transfer_raises_the_next_one_is_called(served: Served) -> None:
    owned, local = served.engine.allocate(4096), served.asking.allocate(4096)
    remote = served.asking.import_region(owned.descriptor())
    for _ in range(2):
        device = served.fabric.device("here")
        device.freeze()
        called = threading.Event()

        def fail(future: object, called: threading.Event = called) -> None:
            called.set()
            raise SystemExit(3)

        served.asking.write(local, remote, [[0, 0, 8]]).future().add_done_callback(fail)
        device.thaw()
        assert called.wait(DEADLINE_S)


def test_what_engines_ask_each_other_is_answered_while_handlers_take_every_thread(served: Served) -> None:
    begun, release = threading.Event(), threading.Event()

    def hold(payload: bytes, caller: Caller) -> bytes:
        begun.set()
        release.wait(2 * DEADLINE_S)
        return b"held"

    served.engine.serve("hold", hold)
    owned, local = served.engine.allocate(4096, name="kv"), served.asking.allocate(4096)
    asked = [threading.Thread(target=served.peer.call, args=("hold",)) for _ in range(4)]
    for thread in asked:
        thread.start()
    try:
        assert begun.wait(DEADLINE_S)
        remote = served.peer.region("kv", owned.key)  # the region by its name
        local.view()[:4] = b"sure"
        served.asking.write(local, remote, [[0, 0, 4096]], verify=True).wait(DEADLINE_S)  # checksums
        assert bytes(owned.view()[:4]) == b"sure"
        assert b"regions" in served.peer.call("mooncake.stats", timeout_s=DEADLINE_S)
        assert all(thread.is_alive() for thread in asked)
    finally:
        release.set()
        for thread in asked:
            thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in asked)


def test_the_threads_of_all_handlers_are_limited() -> None:
    for threads in (0, 1025, 1 << 40):
        with pytest.raises(ConfigError, match=rf"handler_threads is {threads}; it must be 1 to 1024"):
            TransferConfig(handler_threads=threads)
