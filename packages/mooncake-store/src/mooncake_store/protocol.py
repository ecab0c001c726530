"""Messages between clients and the master: msgpack arrays with the message's name first.

Everything about a batch travels in one message, and what there is one of per key travels as one block of
bytes: digests are 16 bytes each, numbers are little-endian uint64, outcomes are one byte each. A client in
the master's process passes the same structs without encoding them.

The method's name carries the version: a master of another version does not know it.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

__all__ = [
    "METHOD",
    "Outcome",
    "Reply",
    "Request",
    "StoreStats",
    "decode_reply",
    "decode_request",
    "encode",
    "notice_method",
]

METHOD = "store.v1"
IfExists = Literal["error", "keep", "replace"]


def notice_method(client: int) -> str:
    """Name under which a client's engine is told, one way, that there are notices to fetch."""
    return f"{METHOD}.notice.{client:016x}"


class Outcome(enum.IntEnum):
    """What became of one key of a batch; one byte on the wire.

    PLACED: room is reserved. EXISTS: the key is taken. FULL: no room. STORED: committed. LOST: the
    reservation or the segment has gone, nothing is stored. FAILED: the writer gave it up.
    """

    PLACED = 0
    EXISTS = 1
    FULL = 2
    STORED = 3
    LOST = 4
    FAILED = 5


class Message(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""


class FromMember(Message, kw_only=True):
    """A request of a client that has joined. ``epoch`` is the master's, as the client knows it."""

    epoch: int = 0
    client: int = 0


class Mount(Message, kw_only=True):
    """Join, and lend a segment if ``nbytes`` is not 0. Whatever the client had before is void.

    A segment must be fresh: nobody may still hold a descriptor that lets them write to it.
    """

    client: int
    nbytes: int
    descriptor: bytes


class Unmount(FromMember, kw_only=True):
    """Leave; the segment's content is gone."""


class Reserve(FromMember, kw_only=True):
    """Room for values that are about to be written, for all keys of a batch, most important first."""

    digests: bytes
    keys: list[bytes]
    sizes: bytes
    if_exists: IfExists
    avoid: list[int]


class Commit(FromMember, kw_only=True):
    """The values of a reservation are written, except those at the positions ``failed``."""

    reservation: int
    failed: list[int]
    if_exists: IfExists
    notices_seen: int


class Locate(FromMember, kw_only=True):
    """Where values lie, with one lease on all of them. Counts as a use."""

    digests: bytes


class Release(FromMember, kw_only=True):
    """The values under a lease are read. The answer tells which of the reads are good."""

    lease: int


class Exist(FromMember, kw_only=True):
    """Which keys have values now. No lease, no use."""

    digests: bytes


class Remove(FromMember, kw_only=True):
    """Make values unfindable at once; their bytes are freed when nobody reads them."""

    digests: bytes


class Heartbeat(FromMember, kw_only=True):
    """The client lives, still reads under ``leases``, and has handled notices up to ``notices_seen``."""

    leases: list[int]
    notices_seen: int


class GetStats(FromMember, kw_only=True):
    """Ask for the store's numbers."""


class Placement(Message, kw_only=True):
    """Extents of the values of a batch: rows of 5 uint64: position in the batch, offset inside the value,
    segment, offset inside the segment, bytes. ``segments`` has the descriptor of each segment named.
    """

    rows: bytes
    segments: dict[int, bytes]


class Notice(msgspec.Struct, array_like=True):
    """A value that the client put, or that lay in its segment, has gone. Numbers rise in a master's life."""

    number: int
    digest: bytes
    key: bytes


class Mounted(Message, kw_only=True):
    """Joined. ``segment`` is 0 when none was lent."""

    epoch: int
    segment: int
    lease_ttl_s: float
    reservation_ttl_s: float


class Reserved(Message, kw_only=True):
    """Outcomes PLACED, EXISTS or FULL. ``room`` is set when something is FULL; ``wait`` when waiting may
    help.
    """

    reservation: int
    outcomes: bytes
    placement: Placement
    room: tuple[int, int, int, int, int] | None
    wait: bool


class Committed(Message, kw_only=True):
    """Outcomes STORED, EXISTS, LOST or FAILED, one for each value placed, or none when the reservation has
    expired; and every notice to this client that came before them.
    """

    outcomes: bytes
    notices: list[Notice]


class Located(Message, kw_only=True):
    """``found`` has one byte per key, 0 or 1; ``sizes`` one uint64 per key, 0 where nothing was found."""

    lease: int
    found: bytes
    sizes: bytes
    placement: Placement


class Released(Message, kw_only=True):
    """Positions, among the values found, of reads that must be thrown away; all of them when ``expired``."""

    expired: bool
    broken: list[int]


class Found(Message, kw_only=True):
    """Answer to Exist and Remove: one byte per key, 0 or 1."""

    found: bytes


class Alive(Message, kw_only=True):
    """Answer to Heartbeat. ``segments`` are the ids that still exist."""

    notices: list[Notice]
    segments: list[int]


class Done(Message, kw_only=True):
    """There is nothing more to say."""


class Stale(Message, kw_only=True):
    """The client is not (any more) a member of this master: it has to mount again. Nothing was done."""

    epoch: int
    reason: str


class StoreStats(Message, kw_only=True):
    """Numbers of the whole store, since the master started where they count.

    Attributes:
        objects: values that can be found.
        capacity_bytes: memory lent.
        used_bytes: taken by objects, those included which are hidden but still being read.
        free_bytes: not taken by anything.
        leased_bytes: part of ``used_bytes`` that is being read.
        reserved_bytes: promised to puts in progress, or still exposed to one that was given up.
        leases: reads in progress (one per batch).
        reservations: puts in progress (one per batch).
        segments: segments lent.
        clients: clients joined.
        hits: keys found by reads.
        misses: keys not found by reads.
        stored: values stored.
        evicted: values evicted.
        removed: values removed or replaced.
        lost: values that went with their owner.
    """

    objects: int
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    leased_bytes: int
    reserved_bytes: int
    leases: int
    reservations: int
    segments: int
    clients: int
    hits: int
    misses: int
    stored: int
    evicted: int
    removed: int
    lost: int


Request = Mount | Unmount | Reserve | Commit | Locate | Release | Exist | Remove | Heartbeat | GetStats
Reply = Mounted | Reserved | Committed | Located | Released | Found | Alive | Done | Stale | StoreStats

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """A request from bytes. Raises msgspec.DecodeError."""
    return _request_decoder.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """A reply from bytes. Raises msgspec.DecodeError."""
    return _reply_decoder.decode(payload)
