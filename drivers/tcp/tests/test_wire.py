"""The target's side of the protocol, spoken to by hand."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from mooncake_driver_tcp.testing import Address, Client, Frame, Op, Refusal
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.testing import pattern

NBYTES = 4096
DEADLINE_S = 10.0
REFUSED, UNREACHABLE = 6, 5
LAST = (1 << 64) - 1


def region_id(region: Region) -> int:
    number: int = msgspec.msgpack.decode(region.descriptor())[4]
    return number


@pytest.fixture
def region(engine: TransferEngine) -> Region:
    region = engine.allocate(NBYTES)
    region.view()[:] = pattern(1, NBYTES).tobytes()
    return region


@pytest.fixture
def good(region: Region) -> Frame:
    """A request for the whole region."""
    return Frame(Op.READ, seq=1, region=region_id(region), key=region.key, length=NBYTES)


def test_a_read_is_answered_with_the_bytes(client: Client, region: Region, good: Frame) -> None:
    client.send(replace(good, seq=7, offset=100, length=50))
    assert client.answer() == Frame(Op.READ_DATA, seq=7, length=50)
    assert client.receive(50) == bytes(region.view()[100:150])


def test_a_write_is_acknowledged_when_its_bytes_are_in_memory(
    client: Client, region: Region, good: Frame
) -> None:
    client.send(replace(good, op=Op.WRITE, offset=10, length=5), b"hello")
    assert client.answer() == Frame(Op.WRITE_DONE, seq=1)
    assert bytes(region.view()[10:15]) == b"hello"


def test_requests_are_answered_in_order(client: Client, region: Region, good: Frame) -> None:
    requests = b""
    for seq in range(1, 3000):
        requests += replace(good, op=Op.WRITE, seq=seq, length=1).packed() + b"x"
        requests += replace(good, seq=seq + 3000, length=1).packed()
    client.socket.sendall(requests)
    for seq in range(1, 3000):
        assert client.answer() == Frame(Op.WRITE_DONE, seq=seq)
        assert client.answer() == Frame(Op.READ_DATA, seq=seq + 3000, length=1)
        assert client.receive(1) == b"x"


def test_frames_may_arrive_in_any_pieces(client: Client, region: Region, good: Frame) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    write, read = replace(good, op=Op.WRITE, length=8), replace(good, length=8)
    for byte in write.packed() + b"in parts" + read.packed():
        client.socket.send(bytes([byte]))
    assert client.answer() == Frame(Op.WRITE_DONE, seq=1)
    assert client.answer() == Frame(Op.READ_DATA, seq=1, length=8)
    assert client.receive(8) == b"in parts"


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"region": 999_999}, Refusal.UNKNOWN_REGION),
        ({"key": bytes(16)}, Refusal.WRONG_KEY),
        ({"offset": 1}, Refusal.OUTSIDE),
        ({"offset": NBYTES}, Refusal.OUTSIDE),
        ({"offset": LAST}, Refusal.OUTSIDE),
        ({"offset": LAST - NBYTES + 1}, Refusal.OUTSIDE),
        ({"length": 1 << 20}, Refusal.OUTSIDE),
    ],
)
def test_a_refused_request_has_no_effect_and_the_connection_goes_on(
    client: Client,
    engine: TransferEngine,
    region: Region,
    good: Frame,
    op: int,
    change: dict[str, int],
    why: int,
) -> None:
    before = bytes(region.view())
    request = replace(good, op=op, **change)  # type: ignore[arg-type]
    client.send(request, b"x" * request.length if op == Op.WRITE else b"")
    done = Op.WRITE_DONE if op == Op.WRITE else Op.READ_DATA
    assert client.answer() == Frame(done, flags=why, seq=1, status=REFUSED)
    client.send(replace(good, seq=2))
    assert client.answer() == Frame(Op.READ_DATA, seq=2, length=NBYTES)
    assert client.receive(NBYTES) == before == bytes(region.view())
    assert engine.stats()["tcp"]["refused"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"op": 0},
        {"op": Op.WRITE_DONE},
        {"op": 77},
        {"version": 1},
        {"magic": b"MCT2"},
        {"reserved": 1},
        {"length": 0},
        {"length": (1 << 30) + 1},
        {"length": LAST},
    ],
    ids=str,
)
def test_a_frame_that_makes_no_sense_ends_the_connection(
    client: Client, region: Region, good: Frame, change: dict[str, int]
) -> None:
    client.send(replace(good, **change))  # type: ignore[arg-type]
    assert client.is_dropped()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02", b"MCT1" + b"\xff" * 60]
)
def test_a_stranger_who_does_not_speak_the_protocol_is_dropped(stranger: Client, words: bytes) -> None:
    stranger.socket.sendall(words)
    assert stranger.is_dropped()


def test_nothing_is_served_before_hello(stranger: Client, region: Region, good: Frame) -> None:
    stranger.send(good)
    assert stranger.is_dropped()


def test_a_hello_meant_for_another_endpoint_is_turned_away(
    engine: TransferEngine, stranger: Client, region: Region, good: Frame
) -> None:
    before = bytes(region.view())
    assert stranger.greet(bytes(16)) == Frame(Op.WELCOME, status=UNREACHABLE)
    stranger.send(replace(good, op=Op.WRITE), b"x" * NBYTES)
    assert stranger.is_dropped()
    assert bytes(region.view()) == before


def test_a_stranger_who_says_nothing_is_dropped_in_time(
    start: Callable[..., TransferEngine], address_of: Callable[[TransferEngine], Address]
) -> None:
    address = address_of(start(connect_timeout_ms=200))
    with Client(address.port) as silent, Client(address.port) as talking:
        assert talking.greet(address.nonce).status == 0
        assert silent.is_dropped()
        # Who has said hello may stay idle for as long as it likes.
        talking.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            talking.is_dropped()


def test_a_peer_that_takes_no_answers_does_not_delay_closing_a_region(
    client: Client, region: Region, good: Frame
) -> None:
    for seq in range(1, 2000):
        client.send(replace(good, seq=seq))
    assert client.answer() == Frame(Op.READ_DATA, seq=1, length=NBYTES)
    region.close(DEADLINE_S)
    received = client.receive(2000 * (NBYTES + 64))
    assert received.count(pattern(1, NBYTES).tobytes()) < 1999
