"""Handlers of compiled code, which answer on the thread that has read the request; made by ctypes here."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest

from mooncake_transfer import Peer, TransferEngine
from mooncake_transfer.errors import ConfigError, PeerUnreachable
from mooncake_transfer.testing.fake import FakeFabric

CAPSULE = b"mooncake.handler.v1"
WRITE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
ANSWER = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, WRITE
)


class HandlerV1(ctypes.Structure):
    _fields_ = (
        ("abi_major", ctypes.c_uint32),
        ("abi_minor", ctypes.c_uint32),
        ("struct_size", ctypes.c_size_t),
        ("context", ctypes.c_void_p),
        ("answer", ANSWER),
    )


KEPT: list[object] = []  # what capsules point to, which is C's


def capsule(handle: Callable[[bytes, int], list[bytes]], major: int = 1) -> object:
    def answer(context: int, connection: int, body: int, nbytes: int, reply: int, write: WRITE) -> None:
        for part in handle(ctypes.string_at(body, nbytes), connection):
            write(reply, part, len(part))

    head = HandlerV1(major, 0, ctypes.sizeof(HandlerV1), None, ANSWER(answer))
    KEPT.append(head)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    made: object = new(ctypes.addressof(head), CAPSULE, None)
    return made


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, Peer]]:
    with (
        FakeFabric() as fabric,
        TransferEngine(fabric.config("there")) as engine,
        TransferEngine(fabric.config("here")) as asking,
    ):
        yield engine, asking.connect(engine.address)


def test_a_compiled_handler_gets_the_request_and_its_parts_are_one_answer(
    engines: tuple[TransferEngine, Peer],
) -> None:
    engine, peer = engines
    seen: list[tuple[int, str]] = []

    def handle(body: bytes, connection: int) -> list[bytes]:
        seen.append((connection, threading.current_thread().name))
        return [body[::-1], b"", b"!"]

    engine.serve_compiled("turn", capsule(handle))
    engine.serve("who", lambda payload, caller: str(caller.connection).encode())
    assert [peer.call("turn", text) for text in (b"abc", b"", b"x" * 100_000)] == [
        b"cba!",
        b"!",
        b"x" * 100_000 + b"!",
    ]
    assert {connection for connection, _ in seen} == {int(peer.call("who"))}
    assert not any(name.startswith("mooncake-run") for _, name in seen), "no thread of Python's handlers"


def test_many_threads_get_their_own_answers(engines: tuple[TransferEngine, Peer]) -> None:
    engine, peer = engines
    engine.serve_compiled("echo", capsule(lambda body, connection: [body]))
    wrong: list[bytes] = []

    def ask(number: int) -> None:
        for turn in range(200):
            text = b"%d %d" % (number, turn)
            if peer.call("echo", text, timeout_s=30) != text:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_an_answer_over_the_limit_ends_the_connection_and_not_the_engine(
    engines: tuple[TransferEngine, Peer],
) -> None:
    engine, peer = engines
    engine.serve_compiled("flood", capsule(lambda body, connection: [bytes(1 << 20)] * 65))
    with pytest.raises(PeerUnreachable):
        peer.call("flood", timeout_s=20)
    engine.serve("ping", lambda payload, caller: b"pong")
    assert peer._engine.connect(engine.address).call("ping") == b"pong"


def test_what_is_no_handler_is_refused_with_the_reason(engines: tuple[TransferEngine, Peer]) -> None:
    engine, _ = engines
    good = capsule(lambda body, connection: [])
    with pytest.raises(ConfigError, match="no PyCapsule named"):
        engine.serve_compiled("x", object())
    with pytest.raises(ConfigError, match="version 2 of the ABI"):
        engine.serve_compiled("x", capsule(lambda body, connection: [], major=2))
    engine.serve_compiled("x", good)
    for again in (lambda: engine.serve_compiled("x", good), lambda: engine.serve("x", lambda p, c: b"")):
        with pytest.raises(ConfigError, match="already has"):
            again()
    engine.serve("y", lambda payload, caller: b"")
    with pytest.raises(ConfigError, match="already has"):
        engine.serve_compiled("y", good)
