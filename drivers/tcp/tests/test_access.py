"""Keys with lesser rights, as the wire sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from mooncake_driver_tcp.testing import Client, Frame, Op, Refusal
from mooncake_transfer import Region, RemoteRegion, TransferEngine
from mooncake_transfer.errors import RegionRefused

NBYTES = 4096
REFUSED = 6

Start = Callable[..., TransferEngine]
Users = Callable[[bytes], tuple[TransferEngine, Region, RemoteRegion]]


@pytest.fixture
def region(engine: TransferEngine) -> Region:
    return engine.allocate(NBYTES)


@pytest.fixture
def users(engine: TransferEngine, region: Region, start: Start) -> Users:
    """Another engine, its memory, and the region by a descriptor."""

    def use(descriptor: bytes) -> tuple[TransferEngine, Region, RemoteRegion]:
        other = start()
        return other, other.allocate(NBYTES), other.import_region(descriptor)

    return use


@pytest.mark.parametrize(("access", "allowed", "denied"), [("r", "read", "write"), ("w", "write", "read")])
def test_a_key_allows_its_direction_only(
    region: Region,
    users: Users,
    access: str,
    allowed: str,
    denied: str,
) -> None:
    other, local, remote = users(region.descriptor(access))  # type: ignore[arg-type]
    getattr(other, allowed)(local, remote, [[0, 0, NBYTES]]).wait()
    with pytest.raises(RegionRefused, match="allow"):
        getattr(other, denied)(local, remote, [[0, 0, NBYTES]]).wait()
    getattr(other, allowed)(local, remote, [[0, 0, NBYTES]]).wait()


def test_a_revoked_key_is_refused_and_the_others_go_on(region: Region, users: Users) -> None:
    first, second = region.grant("r"), region.grant("r")
    other, local, revoked = users(first)
    kept, own = other.import_region(second), other.import_region(region.descriptor())
    other.read(local, revoked, [[0, 0, NBYTES]]).wait()
    region.revoke(first)
    with pytest.raises(RegionRefused, match="revoked"):
        other.read(local, revoked, [[0, 0, NBYTES]]).wait()
    for remote in (kept, own):
        other.read(local, remote, [[0, 0, NBYTES]]).wait()


def test_a_refusal_for_the_direction_names_itself_on_the_wire(client: Client, region: Region) -> None:
    number = msgspec.msgpack.decode(region.descriptor())[4]
    key = bytes(msgspec.msgpack.decode(region.descriptor("r"))[5])
    read = Frame(Op.READ, seq=1, region=number, key=key, length=8)
    client.send(replace(read, op=Op.WRITE), b"x" * 8)
    assert client.answer() == Frame(Op.WRITE_DONE, flags=Refusal.FORBIDDEN, seq=1, status=REFUSED)
    client.send(replace(read, seq=2))
    assert client.answer() == Frame(Op.READ_DATA, seq=2, length=8)
    assert client.receive(8) == bytes(8)
