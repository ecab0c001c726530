"""What engines tell each other, as msgpack. Fields are only ever added at the end, with a default."""

from __future__ import annotations

import msgspec

PROTOCOL = 1
DRIVER_BLOBS = list[tuple[str, bytes]]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First message on a connection, in both directions: who this is and how its drivers are reached."""

    protocol: int
    epoch: int
    address: str
    drivers: DRIVER_BLOBS


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Everything a peer needs to reach one region. Who holds it may read and write the region."""

    protocol: int
    address: str
    epoch: int
    name: str
    region_id: int
    key: bytes
    length: int
    keys: DRIVER_BLOBS


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """How a handler's exception travels."""

    kind: str
    message: str


class RegionQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the descriptor of a region by its name; ``key`` proves that the asker may have it."""

    name: str
    key: bytes
