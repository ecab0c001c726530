"""The channel between engines, below the engine: the compiled class itself."""

import contextlib
import mmap
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_transfer._core import Channel
from mooncake_transfer.errors import CallTimeout, ConfigError, PeerUnreachable

DEADLINE_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    asker, answerer = Channel(), Channel()
    for channel, hello in ((asker, b"asker"), (answerer, b"answerer")):
        channel.listen("127.0.0.1", 0)
        channel.start(hello)
    yield asker, answerer
    asker.close()
    answerer.close()


def answer_in_background(channel: Channel, count: int) -> threading.Thread:
    def answer() -> None:
        for _ in range(count):
            item = channel.next_request(DEADLINE_S)
            assert item is not None
            _, connection, request, method, body = item
            channel.reply(connection, request, method == "fail", body[::-1])

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_both_sides_learn_each_others_hello(pair: tuple[Channel, Channel]) -> None:
    asker, answerer = pair
    connection, hello = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    assert hello == b"answerer"
    event = answerer.next_event(DEADLINE_S)
    assert event is not None
    assert (event[0], event[4]) == ("hello", b"asker")
    assert asker.alive(connection)


@pytest.mark.parametrize("size", [0, 1, 65536, 5_000_000])
def test_a_call_of_any_size_is_answered(pair: tuple[Channel, Channel], size: int) -> None:
    asker, answerer = pair
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    thread = answer_in_background(answerer, 1)
    body = bytes(i % 251 for i in range(size))
    assert asker.call(connection, "reverse", body, DEADLINE_S) == (False, body[::-1])
    thread.join(DEADLINE_S)


def test_a_failure_is_told_apart_from_an_answer(pair: tuple[Channel, Channel]) -> None:
    asker, answerer = pair
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    thread = answer_in_background(answerer, 1)
    assert asker.call(connection, "fail", b"abc", DEADLINE_S) == (True, b"cba")
    thread.join(DEADLINE_S)


def test_a_call_that_nobody_answers_ends_by_its_deadline(pair: tuple[Channel, Channel]) -> None:
    asker, answerer = pair
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    with pytest.raises(CallTimeout, match="no answer in time"):
        asker.call(connection, "silence", b"", 0.1)
    assert asker.alive(connection)


def test_a_call_in_flight_ends_when_the_peer_closes(pair: tuple[Channel, Channel]) -> None:
    asker, answerer = pair
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    closer = threading.Thread(target=lambda: (answerer.next_request(DEADLINE_S), answerer.close()))
    closer.start()
    with pytest.raises(PeerUnreachable, match="closed the connection"):
        asker.call(connection, "anything", b"", DEADLINE_S)
    closer.join(DEADLINE_S)
    assert not asker.alive(connection)


def test_the_loss_of_a_peer_comes_after_its_last_request_is_answered(pair: tuple[Channel, Channel]) -> None:
    asker, answerer = pair
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    assert answerer.next_event(DEADLINE_S) is not None  # hello
    with pytest.raises(CallTimeout):
        asker.call(connection, "slow", b"", 0.05)
    request = answerer.next_request(DEADLINE_S)
    assert request is not None
    asker.close()
    assert answerer.next_event(0.2) is None  # the request is still open
    with contextlib.suppress(PeerUnreachable):  # whether the loss is known by now is a race
        answerer.reply(request[1], request[2], False, b"")
    event = answerer.next_event(DEADLINE_S)
    assert event is not None
    assert event[0] == "lost"


def test_notifications_arrive_in_order(pair: tuple[Channel, Channel]) -> None:
    asker, answerer = pair
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    assert answerer.next_event(DEADLINE_S) is not None
    for i in range(200):
        asker.notify(connection, "tick", str(i).encode(), DEADLINE_S)
    got = [answerer.next_event(DEADLINE_S) for _ in range(200)]
    assert [event[4] for event in got if event] == [str(i).encode() for i in range(200)]


def test_a_port_that_is_taken_is_named_with_a_remedy(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{pair[0].port}.*choose another port"):
        Channel().listen("127.0.0.1", pair[0].port)


def test_a_peer_that_talks_nonsense_is_dropped_and_others_are_served(pair: tuple[Channel, Channel]) -> None:
    asker, answerer = pair
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(range(256)), b"\xff" * 4096):
        with socket.create_connection(("127.0.0.1", answerer.port), DEADLINE_S) as stranger:
            stranger.sendall(nonsense)
            stranger.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass  # why it is refused
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    thread = answer_in_background(answerer, 1)
    assert asker.call(connection, "reverse", b"ab", DEADLINE_S) == (False, b"ba")
    thread.join(DEADLINE_S)


def test_a_peer_that_never_quite_keeps_up_does_not_pile_up_what_it_has_read(
    pair: tuple[Channel, Channel],
) -> None:
    _, answerer = pair
    hello = struct.pack("<IBBHQ", 0, 1, 1, 0, 1)
    request = struct.pack("<IBBHQ", 0, 1, 3, 0, 2)
    body = bytes(1 << 20)
    with socket.create_connection(("127.0.0.1", answerer.port)) as peer:
        peer.sendall(hello + request)
        item = answerer.next_request(DEADLINE_S)
        assert item is not None
        for _ in range(32):  # a backlog, which from here on never empties
            answerer.reply(item[1], 2, False, body)
        before = resident_bytes()
        for _ in range(256):
            answerer.reply(item[1], 2, False, body)
            peer.recv(len(body) + len(request), socket.MSG_WAITALL)
        assert resident_bytes() - before < 128 << 20


def test_a_method_that_is_no_text_is_handed_out_as_text_all_the_same(pair: tuple[Channel, Channel]) -> None:
    _, answerer = pair
    hello, frames = struct.pack("<IBBHQ", 0, 1, 1, 0, 1), b""
    for kind in (3, 6):  # a request and a notification
        frames += struct.pack("<IBBHQ", 0, 1, kind, 2, 2) + b"\xff\xfe"
    with socket.create_connection(("127.0.0.1", answerer.port)) as peer:
        peer.sendall(hello + frames)
        request = answerer.next_request(DEADLINE_S)
        events = [answerer.next_event(DEADLINE_S) for _ in range(2)]
    assert request is not None
    assert [item[3] for item in (request, events[1]) if item is not None] == [r"\xff\xfe"] * 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
