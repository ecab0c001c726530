"""Memory of peers on this host as memory of this process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_transfer import Region, RemoteRegion, TransferEngine, _mapping
from mooncake_transfer.errors import NoRoute, RegionRefused, TransferError
from mooncake_transfer.testing.fake import FakeFabric

NBYTES = 1 << 16


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with (
        FakeFabric() as fabric,
        TransferEngine(fabric.config("there")) as owner,
        TransferEngine(fabric.config("here")) as other,
    ):
        yield owner, other


def reached(other: TransferEngine, region: Region, access: str = "rw") -> RemoteRegion:
    return other.import_region(region.descriptor(access))


def test_what_the_owner_writes_is_seen_and_nothing_can_be_written(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    owner, other = engines
    region = owner.allocate(NBYTES)
    seen = reached(other, region, "r").map()
    assert (len(seen), seen.readonly) == (NBYTES, True)
    region.view()[100:105] = b"hello"
    assert bytes(seen[100:105]) == b"hello"
    with pytest.raises(TypeError):
        seen[0] = 1


def test_a_mapping_outlives_the_region_and_its_owner(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, other = engines
    region = owner.allocate(NBYTES)
    region.view()[:4] = b"kept"
    seen = reached(other, region).map()
    owner.close()
    other.close()
    assert bytes(seen[:4]) == b"kept"


def test_who_may_not_read_may_not_map(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, other = engines
    region = owner.allocate(NBYTES)
    with pytest.raises(RegionRefused):
        reached(other, region, "w").map()
    granted = region.grant("r")
    remote = other.import_region(granted)
    region.revoke(granted)
    with pytest.raises(RegionRefused):
        remote.map()


def test_memory_that_a_user_brought_cannot_be_mapped(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, other = engines
    with pytest.raises(NoRoute, match="no memory that others can map"):
        reached(other, owner.register(np.zeros(NBYTES, dtype=np.uint8))).map()


def test_memory_of_another_host_cannot_be_mapped(
    engines: tuple[TransferEngine, TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = engines
    places = iter([("there", 1), ("here", 1)])
    monkeypatch.setattr(_mapping, "_where", lambda: next(places))
    with pytest.raises(NoRoute, match="on another host"):
        reached(other, owner.allocate(NBYTES)).map()


def test_nothing_is_mapped_of_an_engine_that_is_gone(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, other = engines
    remote = reached(other, owner.allocate(NBYTES))
    owner.close()
    with pytest.raises(TransferError):
        remote.map()
