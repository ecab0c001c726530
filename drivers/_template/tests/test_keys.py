"""Keys that allow less than their region's own, and their revocation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake_transfer import Region, TransferConfig, TransferEngine
from mooncake_transfer.errors import RegionRefused

NBYTES = 1 << 16
WHOLE = [[0, 0, NBYTES]]
CONFIG = TransferConfig(drivers=("template",))


@pytest.fixture
def owner() -> Iterator[TransferEngine]:
    with TransferEngine(CONFIG) as engine:
        yield engine


@pytest.fixture
def user() -> Iterator[TransferEngine]:
    with TransferEngine(CONFIG) as engine:
        yield engine


def filled(engine: TransferEngine, value: int) -> Region:
    """A region full of one value."""
    region = engine.allocate(NBYTES)
    region.view()[:] = bytes([value]) * NBYTES
    return region


def test_a_reading_key_reads_and_writes_nothing(owner: TransferEngine, user: TransferEngine) -> None:
    region, local = filled(owner, 7), filled(user, 1)
    remote = user.import_region(region.descriptor(access="r"))
    with pytest.raises(RegionRefused, match="only reading"):
        user.write(local, remote, WHOLE).wait()
    assert set(bytes(region.view())) == {7}
    user.read(local, remote, WHOLE).wait()
    assert set(bytes(local.view())) == {7}


def test_a_writing_key_writes_and_reads_nothing(owner: TransferEngine, user: TransferEngine) -> None:
    region, local = filled(owner, 7), filled(user, 1)
    remote = user.import_region(region.descriptor(access="w"))
    with pytest.raises(RegionRefused, match="only writing"):
        user.read(local, remote, WHOLE).wait()
    user.write(local, remote, WHOLE).wait()
    assert set(bytes(region.view())) == {1}


def test_a_revoked_key_is_refused_and_the_others_go_on(owner: TransferEngine, user: TransferEngine) -> None:
    region, local = filled(owner, 7), filled(user, 1)
    kept, lent = region.descriptor(), region.descriptor(access="r")
    ended = user.import_region(lent)
    user.read(local, ended, WHOLE).wait()
    region.revoke(lent)
    with pytest.raises(RegionRefused, match="revoked"):
        user.read(local, ended, WHOLE).wait()
    user.read(local, user.import_region(kept), WHOLE).wait()
