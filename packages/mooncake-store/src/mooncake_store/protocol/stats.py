"""The store's numbers."""

from __future__ import annotations

from mooncake_store.protocol.base import FromMember, Reply, Request

__all__ = ["REPLIES", "REQUESTS", "GetStats", "StoreStats"]


class GetStats(FromMember, kw_only=True):
    """Ask for the store's numbers."""


class StoreStats(Reply, kw_only=True):
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
        pinned_bytes: part of ``used_bytes`` that is pinned hard.
        retiring_bytes: part of ``used_bytes`` that is of no value any more, but whose owner has not confirmed
            that it knows.
        adopted: values taken over from the ledgers of owners.
        copied: replicas made of values that were there.
        lacking_replicas: values that wait for a replica that is missing.
        late_reservations: given up at their end, and their room is not given out again before the owners have
            shut their writers out.
        corrupt: replicas in memory that were not what had been put, as readers found twice by checksum;
            nobody is sent there any more.
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
    pinned_bytes: int = 0
    retiring_bytes: int = 0
    adopted: int = 0
    copied: int = 0
    lacking_replicas: int = 0
    late_reservations: int = 0
    corrupt: int = 0


REQUESTS: tuple[type[Request], ...] = (GetStats,)
REPLIES: tuple[type[Reply], ...] = (StoreStats,)
