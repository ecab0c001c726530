"""A region is reached with its key and not otherwise, whichever driver would carry the bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mooncake_transfer import Region, TransferConfig, TransferEngine
from mooncake_transfer.errors import RegionRefused, TransferError

NBYTES = 1 << 20
SECRET = bytes(range(256)) * (NBYTES // 256)
WHOLE = [[0, 0, NBYTES]]


@pytest.fixture(params=["shm", "tcp"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    config = TransferConfig(drivers=(request.param,))
    with TransferEngine(config) as owner, TransferEngine(config) as stranger:
        yield owner, stranger


@pytest.fixture
def secret(engines: tuple[TransferEngine, TransferEngine]) -> Region:
    region = engines[0].allocate(NBYTES, name="secret")
    region.view()[:] = SECRET
    return region


def forged(region: Region) -> bytes:
    descriptor = region.descriptor()
    assert descriptor.count(region.key) == 1
    return descriptor.replace(region.key, os.urandom(len(region.key)))


def test_a_wrong_key_reads_nothing(engines: tuple[TransferEngine, TransferEngine], secret: Region) -> None:
    _, stranger = engines
    local = stranger.allocate(NBYTES)
    with pytest.raises(RegionRefused, match="key"):
        stranger.read(local, stranger.import_region(forged(secret)), WHOLE).wait(10)
    assert bytes(local.view()) == bytes(NBYTES)


def test_a_wrong_key_writes_nothing(engines: tuple[TransferEngine, TransferEngine], secret: Region) -> None:
    _, stranger = engines
    local = stranger.allocate(NBYTES)
    with pytest.raises(RegionRefused, match="key"):
        stranger.write(local, stranger.import_region(forged(secret)), WHOLE).wait(10)
    assert bytes(secret.view()) == SECRET


def test_the_key_of_a_closed_region_is_worth_nothing(
    engines: tuple[TransferEngine, TransferEngine], secret: Region
) -> None:
    _, stranger = engines
    local = stranger.allocate(NBYTES)
    remote = stranger.import_region(secret.descriptor())
    stranger.read(local, remote, WHOLE).wait(10)
    assert bytes(local.view()) == SECRET
    local.view()[:] = bytes(NBYTES)
    secret.close()
    with pytest.raises(TransferError):
        stranger.read(local, remote, WHOLE).wait(10)
    assert bytes(local.view()) == bytes(NBYTES)
