"""What engines tell each other, as msgpack. Fields are only ever added at the end, with a default."""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL = 2
Size = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no number beyond 64 bits
Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
DRIVER_BLOBS = list[tuple[str, str, bytes]]  # driver, device, what the driver says


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First message on a connection, in both directions: who this is and how its drivers are reached."""

    protocol: int
    epoch: int
    address: str
    drivers: DRIVER_BLOBS


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Everything a peer needs to reach one region. Who holds it may do what ``access`` says, no more.

    ``kind`` is the name of its MemoryKind; empty in descriptors of engines that did not say it yet.
    """

    protocol: int
    address: str
    epoch: int
    name: str
    region_id: Size
    key: Key
    length: Size
    keys: DRIVER_BLOBS
    access: str = "rw"
    kind: str = ""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """How a handler's exception travels."""

    kind: str
    message: str


class RegionQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the descriptor of a region by its name; ``key`` proves that the asker may have it."""

    name: str
    key: bytes


class ChecksumQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the xxh3-64 of ranges (offset, bytes) of a region; ``key`` proves the right to reach it."""

    region_id: int
    key: bytes
    ranges: list[tuple[int, int]]


class MapQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks which file the memory of a region is; ``key`` proves the right to read it."""

    region_id: int
    key: bytes


class MapAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The open file ``fd`` of process ``pid``, from ``offset`` on; the numbers mean something only on the
    host, and in the namespace of processes, that are named.
    """

    host: str
    processes: int
    pid: int
    fd: int
    offset: int
    device: int
    inode: int


class FenceOrder(msgspec.Struct, frozen=True, array_like=True):
    """Asks to end what the tokens name, each at its driver and device, within ``timeout_s``."""

    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    tokens: DRIVER_BLOBS


def protocol_of(body: bytes) -> int | None:
    """Return the protocol that a hello or descriptor of any version follows; None when it is neither."""
    try:
        fields = msgspec.msgpack.decode(body)
    except msgspec.MsgspecError:
        return None
    if isinstance(fields, list) and fields and isinstance(fields[0], int):
        return fields[0]
    return None
