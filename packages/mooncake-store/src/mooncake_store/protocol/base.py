"""What every group of messages builds on.

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
    "Done",
    "FromMember",
    "IfExists",
    "Limited",
    "Message",
    "Outcome",
    "Reply",
    "Request",
    "Stale",
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
    reservation or the segment has gone, nothing is stored. FAILED: the writer gave it up. QUOTA: the tenant
    may not store that much. The numbers are those of ``Outcome`` in ``core/object_map.hpp``.
    """

    PLACED = 0
    EXISTS = 1
    FULL = 2
    STORED = 3
    LOST = 4
    FAILED = 5
    QUOTA = 6


class Message(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""


class Request(Message, kw_only=True):
    """Base of what a client asks. A group lists its own in ``REQUESTS``."""


class Reply(Message, kw_only=True):
    """Base of what a master answers. A group lists its own in ``REPLIES``."""


class FromMember(Request, kw_only=True):
    """A request of a client that has joined. ``epoch`` is the master's, as the client knows it."""

    epoch: int = 0
    client: int = 0


class Done(Reply, kw_only=True):
    """There is nothing more to say."""


class Stale(Reply, kw_only=True):
    """The client is not (any more) a member of this master: it has to mount again. Nothing was done."""

    epoch: int
    reason: str


class Limited(Reply, kw_only=True):
    """The tenant has asked for more than it may. Nothing was done; asking again then is all right."""

    retry_after_s: float
