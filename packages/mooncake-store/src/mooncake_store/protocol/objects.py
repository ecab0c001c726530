"""Values are put, looked for, read and removed."""

from __future__ import annotations

import msgspec

from mooncake_store.policy import PutPolicy
from mooncake_store.protocol.base import FromMember, IfExists, Message, Reply, Request
from mooncake_store.protocol.joining import RecordPage
from mooncake_store.protocol.tiers import Tiered

__all__ = [
    "REPLIES",
    "REQUESTS",
    "STRIPES_SINCE_MINOR",
    "Commit",
    "Committed",
    "Counted",
    "EndSession",
    "Exist",
    "FindOwners",
    "Found",
    "GetSizes",
    "Locate",
    "Located",
    "Owners",
    "Pin",
    "Placement",
    "Release",
    "Released",
    "Remove",
    "RemoveAll",
    "Renew",
    "Reserve",
    "Reserved",
    "Sizes",
    "Unpin",
]


STRIPES_SINCE_MINOR = 3  # ``PutPolicy.stripes``


class Placement(Message, kw_only=True):
    """Extents of the values of a batch: rows of 5 uint64: position in the batch, offset inside the value,
    segment, offset inside the segment, bytes. ``segments`` has the descriptor of each segment named.
    """

    rows: bytes
    segments: dict[int, bytes]


class Reserve(FromMember, kw_only=True):
    """Room for values that are about to be written, for all keys of a batch, most important first.

    ``promoted``: values that come from a tier: epoch and version of each record, two uint64.
    ``ended``: leases of this epoch under which nothing is read any more.
    """

    digests: bytes
    keys: list[bytes]
    sizes: bytes
    if_exists: IfExists
    avoid: list[int]
    policy: PutPolicy | None = None
    promoted: bytes = b""
    ended: list[int] = msgspec.field(default_factory=list)


class Commit(FromMember, kw_only=True):
    """The values of a reservation are written, except those at the positions ``failed``.

    ``sums``: the checksum of each of its values, uint64, see checksums.py; or nothing.
    """

    reservation: int
    failed: list[int]
    if_exists: IfExists
    notices_seen: int
    sums: bytes = b""


class Renew(FromMember, kw_only=True):
    """Let a reservation live for another full time. The answer is Found: one byte, 0 when it has ended."""

    reservation: int


class Locate(FromMember, kw_only=True):
    """Where values lie, with one lease on all of them. Counts as a use. ``ended`` as in Reserve.

    ``summed``: their checksums are asked for, too.
    """

    digests: bytes
    ended: list[int] = msgspec.field(default_factory=list)
    summed: bool = False


class Release(FromMember, kw_only=True):
    """The values under a lease are read. The answer tells which of the reads are good.

    ``condemned``: what is not what was put: position, among the values found, and a segment in which the
    replica has bytes. Nobody is sent there any more.
    """

    lease: int
    condemned: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Exist(FromMember, kw_only=True):
    """Which keys have values now. No lease, no use."""

    digests: bytes


class Pin(FromMember, kw_only=True):
    """Keep values from being evicted: for good when ``soft_pin_s`` is None, else while others can go.

    The answer is Found.
    """

    digests: bytes
    soft_pin_s: float | None


class Unpin(FromMember, kw_only=True):
    """End pins of both kinds. The answer is Found."""

    digests: bytes


class EndSession(FromMember, kw_only=True):
    """The session's values may go first. The answer is Counted."""

    session: str


class GetSizes(FromMember, kw_only=True):
    """How large values are. No lease, no use. The answer is Sizes."""

    digests: bytes


class FindOwners(FromMember, kw_only=True):
    """Who lends memory, to ask them for keys of the client's tenant. The answer is Owners."""


class RemoveAll(FromMember, kw_only=True):
    """Remove every value of the client's tenant. The answer is Counted."""


class Remove(FromMember, kw_only=True):
    """Make values unfindable at once; their bytes are freed when nobody reads them."""

    digests: bytes


class Reserved(Reply, kw_only=True):
    """Outcomes PLACED, EXISTS or FULL. ``room`` is set when something is FULL; ``wait`` when waiting may
    help.
    """

    reservation: int
    outcomes: bytes
    placement: Placement
    room: tuple[int, int, int, int, int] | None
    wait: bool


class Committed(Reply, kw_only=True):
    """Outcomes STORED, EXISTS, LOST or FAILED, one for each value placed, or none when the reservation has
    expired; and the records for this client that came before
    them.
    """

    outcomes: bytes
    notices: list[RecordPage]


class Located(Reply, kw_only=True):
    """``found`` has one byte per key, 0 or 1; ``sizes`` one uint64 per key, 0 where nothing was found.

    ``placement`` is of the nearest replica of each; ``others`` has rows like its own, of the next nearest
    replica of each value that has two, and so on. ``placement.segments`` describes the segments of all.
    ``tiered``: what was not found in memory, and is in tiers. ``sums``: one uint64 per key, 0 where the
    checksum is not known; empty where none was asked for.
    """

    lease: int
    found: bytes
    sizes: bytes
    placement: Placement
    others: list[bytes] = msgspec.field(default_factory=list)
    tiered: Tiered | None = None
    sums: bytes = b""


class Sizes(Reply, kw_only=True):
    """``sizes`` has one uint64 per key, 2**64 - 1 for what is not there."""

    sizes: bytes


class Owners(Reply, kw_only=True):
    """For each owner its client id, address, and what shows it that the asking client may see these keys."""

    owners: list[tuple[int, str, bytes]]


class Counted(Reply, kw_only=True):
    """How many values it concerned."""

    count: int


class Released(Reply, kw_only=True):
    """Positions, among the values found, of reads that must be thrown away; all of them when ``expired``."""

    expired: bool
    broken: list[int]


class Found(Reply, kw_only=True):
    """Answer to Exist and Remove: one byte per key, 0 or 1."""

    found: bytes


REQUESTS: tuple[type[Request], ...] = (
    Reserve,
    Commit,
    Locate,
    Release,
    Exist,
    Remove,
    Pin,
    Unpin,
    EndSession,
    RemoveAll,
    GetSizes,
    FindOwners,
    Renew,
)
REPLIES: tuple[type[Reply], ...] = (Reserved, Committed, Located, Released, Found, Counted, Sizes, Owners)
