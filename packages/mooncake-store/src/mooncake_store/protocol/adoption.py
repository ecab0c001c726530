"""What an owner still holds goes to a new master."""

from __future__ import annotations

from mooncake_store.protocol.base import FromMember, Reply, Request

__all__ = ["REPLIES", "REQUESTS", "Adopt", "Adopted"]


class Adopt(FromMember, kw_only=True):
    """A part of the ledger of the segment that was mounted with ``keeps``: records, as ``core/records.hpp``
    lays them out. The segment takes new values after the ``last`` part.
    """

    frames: bytes
    last: bool


class Adopted(Reply, kw_only=True):
    """How many objects of the part are found now, wait for the word of another owner, or were refused: there
    is a later value of the key. The owner is told of those refused by a record of each.
    """

    adopted: int
    waiting: int
    refused: int


REQUESTS: tuple[type[Request], ...] = (Adopt,)
REPLIES: tuple[type[Reply], ...] = (Adopted,)
