"""Descriptors and block lists that lie: refused with a typed error, and no byte moves that should not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_transfer import Region, TransferConfig, TransferEngine, _wire
from mooncake_transfer.errors import RegionRefused, TransferError
from mooncake_transfer.testing.fixtures import bytes_of
from mooncake_transfer.testing.pattern import pattern

NBYTES = 1 << 16
DEADLINE_S = 20.0
TOP = 1 << 64

Engines = tuple[TransferEngine, TransferEngine]


@pytest.fixture(params=["tcp", "shm"])
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    config = TransferConfig(drivers=(request.param,), connect_timeout_s=2.0)
    with TransferEngine(config) as owner, TransferEngine(config) as stranger:
        yield owner, stranger


@pytest.fixture
def owned(engines: Engines) -> Region:
    region = engines[0].allocate(NBYTES, name="target")
    bytes_of(region)[:] = pattern(1, NBYTES)
    return region


@pytest.fixture
def local(engines: Engines) -> Region:
    region = engines[1].allocate(NBYTES)
    bytes_of(region)[:] = pattern(2, NBYTES)
    return region


def forged(descriptor: bytes, **changes: Any) -> bytes:
    found = msgspec.msgpack.decode(descriptor, type=_wire.Descriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(found, **changes))


def check_works(engines: Engines, owned: Region) -> None:
    place = engines[1].allocate(NBYTES)
    engines[1].read(place, engines[1].import_region(owned.descriptor()), [[0, 0, NBYTES]]).wait(DEADLINE_S)
    assert np.array_equal(bytes_of(place), bytes_of(owned))
    place.close()


def test_a_descriptor_with_any_byte_changed_moves_nothing_it_should_not(
    engines: Engines, owned: Region, local: Region
) -> None:
    """Three changes of each byte. The address is left alone: it could become that of somebody else."""
    stranger = engines[1]
    descriptor = owned.descriptor()
    address = descriptor.index(engines[0].address.encode())
    untouchable = range(address - 1, address + len(engines[0].address))
    refused = 0
    for at in set(range(len(descriptor))) - set(untouchable):
        for change in (0x01, 0x80, 0xFF):
            wrong = bytearray(descriptor)
            wrong[at] ^= change
            try:
                remote = stranger.import_region(bytes(wrong), timeout_s=2.0)
                stranger.write(local, remote, [[0, 0, min(16, remote.nbytes)]]).wait(DEADLINE_S)
            except TransferError:
                refused += 1
                assert np.array_equal(bytes_of(owned), pattern(1, NBYTES)), f"byte {at} ^ {change:#x}"
            else:
                # What was changed says nothing about the right to be there: a name, a length, a device.
                bytes_of(owned)[:] = pattern(1, NBYTES)
    assert refused > 3 * 16 + 3  # the key and the protocol at the least
    check_works(engines, owned)


def test_a_descriptor_that_ends_early_is_none(engines: Engines, owned: Region) -> None:
    descriptor = owned.descriptor()
    for length in range(len(descriptor)):
        with pytest.raises(TransferError):
            engines[1].import_region(descriptor[:length])
    with pytest.raises(TransferError):
        engines[1].import_region(descriptor + b"\0")
    check_works(engines, owned)


@pytest.mark.parametrize("length", [NBYTES + 1, 1 << 40, (1 << 63) - 1, 1 << 63, TOP - 1])
@pytest.mark.parametrize("way", ["read", "write"])
def test_a_forged_length_does_not_help_beyond_the_region(
    engines: Engines, owned: Region, local: Region, length: int, way: str
) -> None:
    """By one byte, by many, and where the end would wrap around 2^64."""
    remote = engines[1].import_region(forged(owned.descriptor(), length=length))
    move = engines[1].read if way == "read" else engines[1].write
    for block in (
        [0, NBYTES, 1],
        [0, 1, NBYTES],
        [0, NBYTES - 1, 2],
        [0, length - 1, 1],
        [0, length - 16, 16],
    ):
        with pytest.raises(RegionRefused, match="target"):
            move(local, remote, np.array([block], np.uint64)).wait(DEADLINE_S)
    assert np.array_equal(bytes_of(owned), pattern(1, NBYTES))
    assert np.array_equal(bytes_of(local), pattern(2, NBYTES))
    check_works(engines, owned)


@pytest.mark.parametrize("way", ["read", "write"])
def test_blocks_outside_or_around_the_end_of_numbers_never_start(
    engines: Engines, owned: Region, local: Region, way: str
) -> None:
    remote = engines[1].import_region(owned.descriptor())
    move = engines[1].read if way == "read" else engines[1].write
    edges = [NBYTES, NBYTES + 1, 1 << 32, 1 << 63, TOP - NBYTES, TOP - 2, TOP - 1]
    wrong = [[edge, 0, 1] for edge in edges] + [[0, edge, 1] for edge in edges]
    wrong += [[1, 0, edge] for edge in edges] + [[0, 1, edge] for edge in edges]
    wrong += [[edge, TOP - edge, edge] for edge in edges] + [[TOP - 1, TOP - 1, TOP - 1]]
    for block in wrong:
        blocks = np.array([[0, 0, 8], block, [8, 8, 8]], dtype=np.uint64)
        with pytest.raises(RegionRefused):
            move(local, remote, blocks)
    assert np.array_equal(bytes_of(owned), pattern(1, NBYTES))
    assert np.array_equal(bytes_of(local), pattern(2, NBYTES))


def test_lengths_that_add_up_beyond_numbers_are_no_trick(
    engines: Engines, owned: Region, local: Region
) -> None:
    """Each block fits, all of them together do not fit into 64 bits: never so many, but the sum must hold."""
    remote = engines[1].import_region(owned.descriptor())
    blocks = np.tile(np.array([[0, 0, TOP // 2]], dtype=np.uint64), (2, 1))
    with pytest.raises(RegionRefused):
        engines[1].write(local, remote, blocks)
    assert np.array_equal(bytes_of(owned), pattern(1, NBYTES))


def test_the_same_block_many_times_is_moved_as_often(engines: Engines, owned: Region, local: Region) -> None:
    remote = engines[1].import_region(owned.descriptor())
    blocks = np.tile(np.array([[128, 256, 512]], np.uint64), (2000, 1))
    transfer = engines[1].write(local, remote, blocks)
    transfer.wait(DEADLINE_S)
    assert transfer.bytes_done == transfer.nbytes == 2000 * 512
    expected = pattern(1, NBYTES)
    expected[256:768] = pattern(2, NBYTES)[128:640]
    assert np.array_equal(bytes_of(owned), expected)


@pytest.mark.parametrize("key", [bytes(16), b"\xff" * 16])
def test_a_guessed_key_opens_nothing(engines: Engines, owned: Region, local: Region, key: bytes) -> None:
    remote = engines[1].import_region(forged(owned.descriptor(), key=key))
    for move in (engines[1].read, engines[1].write):
        with pytest.raises(RegionRefused, match="key"):
            move(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)
    assert np.array_equal(bytes_of(owned), pattern(1, NBYTES))


def test_strangers_at_the_channel_get_nowhere(engines: Engines, owned: Region) -> None:
    """Noise, frames cut short, frames of absurd lengths: each costs its connection and nothing else."""
    host, _, port = engines[0].address.rpartition(":")
    random = np.random.default_rng(5)
    for round_ in range(300):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
            noise = random.integers(0, 256, 1 + round_ * 3, dtype=np.uint8).tobytes()
            # Lengths first: little, much, all.
            client.sendall(
                [b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", noise[:4]][round_ % 4] + noise
            )
    check_works(engines, owned)
