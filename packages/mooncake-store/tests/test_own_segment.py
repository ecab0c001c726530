"""The keys of a segment, while they are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from mooncake_store.own_segment import OwnSegment
from mooncake_transfer import Region, TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, DriverUnavailable

LONG_S = 20.0
KEYS = 7  # where a descriptor has what each driver says


@pytest.fixture
def segment() -> Iterator[OwnSegment]:
    with TransferEngine(TransferConfig(drivers=("shm", "tcp"))) as engine:
        segment = OwnSegment(engine, 4096)
        yield segment
        segment.close(LONG_S)


def change_grants(monkeypatch: pytest.MonkeyPatch, change: Callable[[Region, bytes], bytes]) -> list[bytes]:
    """Have every key that is made go through ``change`` before its maker gets it; which they were."""
    made: list[bytes] = []
    grant = Region.grant

    def changed(region: Region, access: str = "rw") -> bytes:
        made.append(grant(region, "rw"))
        return change(region, made[-1])

    monkeypatch.setattr(Region, "grant", changed)
    return made


def test_a_key_that_a_driver_does_not_take_is_not_given_out(
    segment: OwnSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, region = segment.descriptor(), segment.region
    assert region is not None
    assert {driver for driver, _ in region.ways(before)} == {"shm", "tcp"}

    def without_shm(_: Region, descriptor: bytes) -> bytes:
        fields = msgspec.msgpack.decode(descriptor)
        fields[KEYS] = [one for one in fields[KEYS] if one[0] != "shm"]
        return msgspec.msgpack.encode(fields)

    with monkeypatch.context() as patch:
        made = change_grants(patch, without_shm)
        with pytest.raises(DriverUnavailable, match="no new access key for the segment now from: shm"):
            segment.regrant()
    assert segment.descriptor() == before
    with pytest.raises(ConfigError, match="revoked already"):
        region.revoke(made[0], LONG_S)
    previous, new = segment.regrant()
    assert (previous, segment.descriptor()) == (before, new)
    assert segment.retire(new, LONG_S)


def test_a_key_of_memory_that_is_exchanged_meanwhile_is_not_taken_for_one_of_the_next(
    segment: OwnSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = segment.descriptor()

    def exchange(_: Region, descriptor: bytes) -> bytes:
        segment.renew(LONG_S)
        return descriptor

    with monkeypatch.context() as patch:
        change_grants(patch, exchange)
        assert segment.regrant() == (b"", b"")
    after = segment.descriptor()
    assert after != before
    assert segment.regrant()[0] == after
