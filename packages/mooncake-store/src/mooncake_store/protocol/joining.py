"""Joining a master, staying, and leaving."""

from __future__ import annotations

import msgspec

from mooncake_store.protocol.base import FromMember, Reply, Request

__all__ = ["REPLIES", "REQUESTS", "Alive", "Heartbeat", "Mount", "Mounted", "RecordPage", "Unmount"]


# Records for a member, as ``core/records.hpp`` lays them out: the number of the first, and all of them one
# after the other. Numbers rise by one in the life of one standing, and are above those of all before.
RecordPage = tuple[int, bytes]


class Mount(Request, kw_only=True):
    """Join, and lend a segment if ``nbytes`` is not 0. Whatever the client had before is void.

    Nobody may still hold a descriptor of before that lets them write to the segment. With ``keeps``, it still
    has what lay in it, and its ledger follows (Adopt). ``last_version``: the highest in it. ``minors`` and
    ``features``: see ``versions``. ``epoch_seen`` is the highest epoch of this cluster the client has seen.
    ``tenant``: whose keys the client names. ``segment``: its id, a random number of 63 bits that stays the
    same while its memory does. ``node`` tells machines apart, 0 when it is not known. ``address``: where the
    client's engine is reached. ``draining``: the segment is to become empty.
    """

    client: int
    nbytes: int
    descriptor: bytes
    minors: tuple[int, int] = (0, 0)
    features: list[str] = msgspec.field(default_factory=list)
    epoch_seen: int = 0
    tenant: str = ""
    segment: int = 0
    node: int = 0
    keeps: bool = False
    last_version: int = 0
    address: str = ""
    draining: bool = False


class Unmount(FromMember, kw_only=True):
    """Leave; the segment's content is gone."""


class Heartbeat(FromMember, kw_only=True):
    """The client lives, still reads under ``leases``, and has handled notices up to ``notices_seen``.

    ``ended`` as in Reserve.
    """

    leases: list[int]
    notices_seen: int
    ended: list[int] = msgspec.field(default_factory=list)


class Mounted(Reply, kw_only=True):
    """Joined. ``secret`` shows the client what its master has allowed others to ask of it.
    ``segment`` is 0 when none was lent. ``minor`` is spoken from now on. ``recovery``: the ledger
    of a segment that ``keeps`` is wanted, and the next master will want it, too; else what lay there is gone.
    """

    epoch: int
    segment: int
    lease_ttl_s: float
    reservation_ttl_s: float
    minor: int = 0
    features: list[str] = msgspec.field(default_factory=list)
    recovery: bool = False
    secret: bytes = b""


class Alive(Reply, kw_only=True):
    """Answer to Heartbeat. ``segments`` are the ids that still exist. ``copies``: there may be something for
    this client to copy. ``draining``: its segment is to become empty. ``expired``: leases that were to be
    renewed and are over. ``broken``: leases that go on, but an owner of memory under them was lost meanwhile.
    ``fence``: late writers are to be shut out of this client's segment, see ``fencing``.
    """

    notices: list[RecordPage]
    segments: list[int]
    copies: bool = False
    draining: bool = False
    expired: list[int] = msgspec.field(default_factory=list)
    broken: list[int] = msgspec.field(default_factory=list)
    fence: bool = False


REQUESTS: tuple[type[Request], ...] = (
    Mount,
    Unmount,
    Heartbeat,
)
REPLIES: tuple[type[Reply], ...] = (
    Mounted,
    Alive,
)
