"""Values beyond memory: owners say what their tiers hold, readers learn which owner to ask.

``numbers`` of records are rows of 3 uint64: epoch, version, bytes of the value. ``rows`` of values that lie
in tiers only are 5 uint64: position in the batch, number of the tier, epoch, version, bytes.
"""

from __future__ import annotations

import msgspec

from mooncake_store.protocol.base import METHOD, FromMember, Message, Reply, Request

__all__ = [
    "REPLIES",
    "REQUESTS",
    "AdoptRecords",
    "MountTiers",
    "Offloaded",
    "Offloads",
    "RecordsLost",
    "RecordsTaken",
    "Stage",
    "Staged",
    "TakeOffloads",
    "Tiered",
    "TiersMounted",
    "Unstage",
    "Unstaged",
    "decode_stage",
    "stage_method",
]


def stage_method(client: int) -> str:
    """Name under which an owner's engine takes Stage and Unstage."""
    return f"{METHOD}.stage.{client:016x}"


class Tiered(Message, kw_only=True):
    """Values of a batch that lie in tiers only. ``owners`` has, for each tier named, who can read from it:
    (client, address of its engine).
    """

    rows: bytes
    owners: dict[int, list[tuple[int, str]]]


class MountTiers(FromMember, kw_only=True):
    """The client opens tiers, each by its lasting name. ``shared``: others may have it open, too. What it
    mounted before is void.
    """

    address: str
    tiers: list[tuple[str, bool]]
    touches: int


class TiersMounted(Reply, kw_only=True):
    """The numbers of the tiers, in their order."""

    tiers: list[int]


class AdoptRecords(FromMember, kw_only=True):
    """Records that were in a tier when it was opened. Answer: those taken; the others are to be dropped.

    ``tenants``: of each, whose it is; without, who is trusted with one tenant only does not find them.
    """

    tier: int
    digests: bytes
    numbers: bytes
    tenants: list[str] = msgspec.field(default_factory=list)


class TakeOffloads(FromMember, kw_only=True):
    """What is to be written to tiers, at most so many values, and what is to be dropped."""

    most: int


class Offloads(Reply, kw_only=True):
    """What is to be written: ``keys`` with their tenants, and ``versions`` of this epoch, one uint64 each.

    ``drop``: (tier, digest, epoch, version). ``mounted`` is False when the master does not know the client's
    tiers (any more), which it then mounts again.
    """

    mounted: bool
    digests: bytes
    keys: list[tuple[bytes, str]]
    versions: bytes
    drop: list[tuple[int, bytes, int, int]]


class Offloaded(FromMember, kw_only=True):
    """Values are in a tier now. Answer: those taken; the others are to be dropped, they are out of date.

    ``done``: digests of what this client will not come back to, whether it was written or not.
    """

    tier: int
    digests: bytes
    numbers: bytes
    done: bytes


class RecordsLost(FromMember, kw_only=True):
    """Records have left a tier by themselves."""

    tier: int
    digests: bytes
    numbers: bytes


class RecordsTaken(Reply, kw_only=True):
    """One byte per record, 0 or 1."""

    taken: bytes


REQUESTS: tuple[type[Request], ...] = (MountTiers, AdoptRecords, TakeOffloads, Offloaded, RecordsLost)
REPLIES: tuple[type[Reply], ...] = (TiersMounted, Offloads, RecordsTaken)


class Stage(Message, kw_only=True):
    """To an owner: bring records of a tier, as many as there is room for, where the asker can read."""

    tier: int
    digests: bytes
    numbers: bytes


class Staged(Message, kw_only=True):
    """``offsets`` says where each of the first records lies in the region of ``descriptor``; -1 for a miss.

    There was no room for those after them. They stay until Unstage, but not for ever.
    """

    lease: int
    descriptor: bytes
    offsets: list[int]


class Unstage(Message, kw_only=True):
    """To an owner: what was staged has been read."""

    lease: int


class Unstaged(Message, kw_only=True):
    """Whether it was there until now; else what was read is void."""

    held: bool


_decoder = msgspec.msgpack.Decoder(Stage | Unstage | Staged | Unstaged)


def decode_stage(payload: bytes) -> Stage | Unstage | Staged | Unstaged:
    """A message between a reader and an owner. Raises msgspec.DecodeError."""
    message: Stage | Unstage | Staged | Unstaged = _decoder.decode(payload)
    return message
