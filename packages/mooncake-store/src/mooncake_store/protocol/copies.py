"""Replicas are made of values that are there, and segments become empty before their owners leave.

Who moves the bytes is an owner of the source: it has the key's text and its bytes at hand. It asks for what
there is to copy (TakeCopies) when a heartbeat's answer says so, and reports (EndCopies). Since minor 2.
"""

from __future__ import annotations

import enum

import msgspec

from mooncake_store.protocol.base import FromMember, Reply, Request
from mooncake_store.protocol.objects import Placement

__all__ = [
    "REPLIES",
    "REQUESTS",
    "SINCE_MINOR",
    "AskCopies",
    "CopiesAsked",
    "CopiesEnded",
    "CopiesToMake",
    "CopyOutcome",
    "Drain",
    "Drained",
    "EndCopies",
    "FindReplicas",
    "LookAfterCopies",
    "Replicas",
    "TakeCopies",
]

SINCE_MINOR = 2


class CopyOutcome(enum.IntEnum):
    """What became of one copy; one byte on the wire. The numbers are those of ``core/copies.hpp``.

    PENDING: yet to be made. STORED: made. THERE: there already. GONE: the value is not there (any more).
    FULL: no room now. QUOTA: the tenant may not store that much. NOWHERE: no segment may take it, as every
    owner has a replica of it or takes nothing. LOST: source, target or mover went meanwhile. FAILED: the
    bytes did not move. BUSY: another replica of it is just being made.
    """

    PENDING = 0
    STORED = 1
    THERE = 2
    GONE = 3
    FULL = 4
    QUOTA = 5
    NOWHERE = 6
    LOST = 7
    FAILED = 8
    BUSY = 9


class AskCopies(FromMember, kw_only=True):
    """Have replicas made: ``replicas`` in all, from now on and after deaths, too; or one in the segment
    ``target``, and then take away the one in the segment ``source``, if given. Answer: CopiesAsked.
    """

    digests: bytes
    replicas: int = 0
    target: int = 0
    source: int = 0


class LookAfterCopies(FromMember, kw_only=True):
    """What has become of copies asked for. Answer: CopiesAsked; without outcomes when it is not known."""

    job: int


class FindReplicas(FromMember, kw_only=True):
    """Where whole replicas lie. No lease, no use. Answer: Replicas."""

    digests: bytes


class Drain(FromMember, kw_only=True):
    """Let a segment become empty (0: the client's own), take new values again, or just tell (None).

    Answer: Drained.
    """

    segment: int = 0
    on: bool | None = None


class TakeCopies(FromMember, kw_only=True):
    """The client makes copies: of about so many bytes at once. Answer: CopiesToMake."""

    most_bytes: int


class EndCopies(FromMember, kw_only=True):
    """Copies have been made, except those at the positions ``failed``; nobody writes there any more, or, to
    those that failed, not beyond the deadline. ``keys``: the text of each key, empty where it failed.
    """

    copy: int
    failed: list[int]
    keys: list[bytes]


class CopiesAsked(Reply, kw_only=True):
    """A number to ask by, and CopyOutcomes, one byte per key."""

    job: int
    outcomes: bytes


class Replicas(Reply, kw_only=True):
    """Per key the segments that its whole replicas lie in; None for what is not there."""

    segments: list[list[int] | None]


class CopiesToMake(Reply, kw_only=True):
    """Copies to make until ``reservation_ttl_s`` from the question: ``versions`` and ``sizes`` are uint64,
    one each, and the placements number them so. ``copy`` is 0 when there is nothing to do now; ``more``: ask
    again at once.
    """

    copy: int
    versions: bytes
    sizes: bytes
    source: Placement
    target: Placement
    more: bool


class CopiesEnded(Reply, kw_only=True):
    """CopyOutcomes, one byte per copy."""

    outcomes: bytes


class Drained(Reply, kw_only=True):
    """How far a segment is with becoming empty.

    Attributes:
        on: it takes nothing new.
        done: nothing lies there any more that is not elsewhere, or that anybody may still read there.
        stuck: nothing could be copied lately of what is left.
        moved: values copied elsewhere.
        moved_bytes: of them.
        gone: values that left without a copy: evicted, as room was needed and they came first, or removed.
        left: values that have to be copied yet, as of the last look.
        reading: values copied, and still being read there.
        left_bytes: what is taken in the segment.
        reasons: why values could not be copied: names of CopyOutcome, with how often at the last try.
    """

    segment: int
    on: bool
    done: bool = False
    stuck: bool = False
    moved: int = 0
    moved_bytes: int = 0
    gone: int = 0
    left: int = 0
    reading: int = 0
    left_bytes: int = 0
    reasons: dict[str, int] = msgspec.field(default_factory=dict)


REQUESTS: tuple[type[Request], ...] = (
    AskCopies,
    LookAfterCopies,
    FindReplicas,
    Drain,
    TakeCopies,
    EndCopies,
)
REPLIES: tuple[type[Reply], ...] = (CopiesAsked, Replicas, CopiesToMake, CopiesEnded, Drained)
