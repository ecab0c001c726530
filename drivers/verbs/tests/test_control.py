"""The control protocol, spoken by hand: what an endpoint tells, and to whom it tells nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from mooncake_driver_verbs.testing import HEADER, Address, Control, QueuePairs, parse_address
from mooncake_transfer import Region, TransferConfig, TransferEngine, _wire

NBYTES = 64 << 10
MC_UNREACHABLE, MC_REFUSED = 5, 6
MANY = 16  # queue pairs, as many as one may ask for
PEERS_WITH_PLACES = 16384 // (8 * MANY)
OURS = QueuePairs(((77, 5), (78, 6)), bytes(10) + b"\xff\xff\x0a\x00\x00\x02", mtu=3)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(drivers=("verbs_double",))) as engine:
        yield engine


@pytest.fixture
def address(engine: TransferEngine) -> Address:
    (blob,) = [blob for name, _, blob in engine._core.addresses() if name == "verbs_double"]
    return parse_address(blob)


def identity(descriptor: bytes) -> tuple[int, bytes]:
    found = msgspec.msgpack.decode(descriptor, type=_wire.Descriptor)
    return found.region_id, found.key


@pytest.fixture
def region(engine: TransferEngine) -> Region:
    return engine.allocate(NBYTES)


def test_who_has_the_key_is_told_where_the_region_is(address: Address, region: Region) -> None:
    with Control(address) as control:
        theirs = control.greet(OURS, os.urandom(16))
        assert len(theirs.numbers) == len(OURS.numbers)
        told = control.import_key(*identity(region.descriptor()))
        assert (told.status, told.access, told.length, len(told.rkeys)) == (0, 3, NBYTES, 1)
        granted = control.import_key(*identity(region.grant("r")))
        assert (granted.status, granted.access) == (0, 1)
        assert granted.rkeys != told.rkeys


def test_the_device_address_of_a_region_is_never_that_of_another(
    engine: TransferEngine, address: Address
) -> None:
    """Also when it has the same memory and key of the device: what a peer kept opens nothing."""
    seen = set()
    with Control(address) as control:
        control.greet(OURS, os.urandom(16))
        for _ in range(20):
            region = engine.allocate(NBYTES)
            told = control.import_key(*identity(region.descriptor()))
            assert told.address not in seen
            seen.add(told.address)
            region.close()


@pytest.mark.parametrize("change", ["key", "region", "revoked", "closed"])
def test_without_a_valid_key_nothing_is_told(address: Address, region: Region, change: str) -> None:
    granted = region.grant("rw")
    number, key = identity(granted)
    if change == "key":
        key = bytes([key[0] ^ 1]) + key[1:]
    elif change == "region":
        number += 1000
    elif change == "revoked":
        region.revoke(granted)
    else:
        region.close()
    with Control(address) as control:
        control.greet(OURS, os.urandom(16))
        told = control.import_key(number, key)
        assert (told.status, told.address, told.rkeys) == (MC_REFUSED, 0, ())
        assert told.reason


def test_an_endpoint_that_is_another_one_is_found_out(address: Address) -> None:
    other = Address(bytes(16), address.port, address.hosts)
    with Control(other) as control, pytest.raises(ConnectionRefusedError, match="restarted"):
        control.greet(OURS, os.urandom(16))


def many(first: int) -> QueuePairs:
    return QueuePairs(tuple((first + i, 5) for i in range(MANY)), OURS.gid, OURS.mtu)


def test_one_peer_takes_up_no_more_places_however_often_it_says_hello(address: Address) -> None:
    with Control(address) as control:
        for generation in range(PEERS_WITH_PLACES + 1):
            assert control.greet(many(1), os.urandom(16), generation).places is not None


def test_a_peer_for_whose_notices_there_is_no_place_is_told_by_the_channel(
    engine: TransferEngine, address: Address
) -> None:
    """It gets queue pairs all the same, and its transfers move by them."""
    region = engine.allocate(NBYTES)
    told: list[bytes] = []
    engine.serve("done", lambda payload, _: told.append(payload))
    with ExitStack() as held, TransferEngine(TransferConfig(drivers=("verbs_double",))) as other:
        for peer in range(PEERS_WITH_PLACES):
            control = held.enter_context(Control(address))
            assert control.greet(many(peer * MANY), os.urandom(16)).places is not None
        last = held.enter_context(Control(address)).greet(OURS, os.urandom(16))
        assert (len(last.numbers), last.places) == (len(OURS.numbers), None)
        local, remote = other.allocate(NBYTES), other.import_region(region.descriptor())
        sent = 0
        for number in range(1, 256):
            local.view()[:] = bytes([number]) * NBYTES
            other.write(local, remote, [[0, 0, NBYTES]], notify=("done", b"%d" % number)).wait(20)
            sent = number
            if any(row["errors"] for row in other.stats().values()):
                break  # the driver was asked, and said that there is no place
        assert sum(row["errors"] for row in other.stats().values()) == 1
        assert sum(row["notices_sent"] for row in other.stats().values()) == 0
        end_s = time.monotonic() + 20
        while len(told) < sent and time.monotonic() < end_s:
            time.sleep(0.001)
    assert told == [b"%d" % number for number in range(1, sent + 1)]
    assert bytes(region.view()) == bytes([sent]) * NBYTES


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(b"MCV1", 3, 32) + bytes(32),  # asks for a key and has not said hello
        HEADER.pack(b"MCV1", 1, 16) + bytes(16),  # half a hello
        HEADER.pack(b"MCV1", 9, 0),
        HEADER.pack(b"MCV1", 1, 1 << 30),
    ],
)
def test_nonsense_ends_its_own_connection_and_nothing_else(
    address: Address, region: Region, said: bytes
) -> None:
    with socket.create_connection((address.hosts[0], address.port), timeout=20) as stranger:
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    test_who_has_the_key_is_told_where_the_region_is(address, region)
