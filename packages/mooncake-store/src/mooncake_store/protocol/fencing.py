"""Room whose writer was late is given out again only after its owner has shut that writer out.

A writer that is stopped in the middle of a write ends it some time after its reservation has expired. Its
access key is what it can still be told apart by: the owner makes a new one, which all get from then on
(Regrant), takes the older ones back when who works under them has had the time to end, and says so (Fenced).
Since minor 3.
"""

from __future__ import annotations

from mooncake_store.protocol.base import FromMember, Reply, Request

__all__ = ["REPLIES", "REQUESTS", "SINCE_MINOR", "Fenced", "Reach", "Reached", "Regrant"]

SINCE_MINOR = 3


class Regrant(FromMember, kw_only=True):
    """From now on, others reach the member's segment by ``descriptor``, and not by ``previous``. Nothing
    happens where that is not in force: the member may have joined anew since.
    """

    previous: bytes
    descriptor: bytes


class Fenced(FromMember, kw_only=True):
    """Nobody reaches the member's segment any more but by ``descriptor``, and nobody is still writing."""

    descriptor: bytes


class Reach(FromMember, kw_only=True):
    """How are these segments reached now? Who asks shows that it may know by the ``descriptors`` it has."""

    descriptors: list[bytes]


class Reached(Reply, kw_only=True):
    """Answer to Reach: for each, the one in force, or nothing where the segment is not the same any more."""

    descriptors: list[bytes]


REQUESTS: tuple[type[Request], ...] = (Regrant, Fenced, Reach)
REPLIES: tuple[type[Reply], ...] = (Reached,)
