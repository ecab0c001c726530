"""What a master tells of itself to people and to what watches it."""

from __future__ import annotations

import msgspec

from mooncake_store.protocol.base import FromMember, Reply, Request
from mooncake_store.protocol.stats import StoreStats
from mooncake_store.telemetry.latency import Latency

__all__ = [
    "REPLIES",
    "REQUESTS",
    "GetReport",
    "HotObject",
    "SegmentReport",
    "StoreReport",
    "TenantReport",
    "TierReport",
]


class GetReport(FromMember, kw_only=True):
    """Ask for everything that is shown of a store; ``hot``: how many of the most read objects."""

    hot: int = 20


class SegmentReport(msgspec.Struct, kw_only=True):
    """One segment now.

    Attributes:
        segment: its id.
        address: engine of its owner; empty when that lives in the master's process.
        capacity_bytes: memory lent.
        free_bytes: not taken.
        largest_hole_bytes: the largest value that fits in one piece.
        evictable_bytes: taken by objects that nobody reads.
        leased_bytes: taken by objects that are being read.
        reserved_bytes: taken by puts in progress.
        pinned_bytes: taken by objects that are pinned hard.
        retiring_bytes: of no object any more, which its owner has not confirmed yet.
        value_bytes: what the values have; less than what is taken, by what whole granules cost.
        draining: it takes nothing new, and is to become empty.
    """

    segment: int
    address: str
    capacity_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    evictable_bytes: int
    leased_bytes: int
    reserved_bytes: int
    pinned_bytes: int = 0
    retiring_bytes: int = 0
    value_bytes: int = 0
    draining: bool = False


class HotObject(msgspec.Struct, kw_only=True):
    """One of the most read objects.

    Attributes:
        digest: its name inside the master, in hexadecimal.
        reads: about how often it was read lately.
        nbytes: its size; None when it is not there any more.
        version: which version of its key it is; 0 when it is not in memory.
        key: its key, where the client that asks for the report may know it and an owner said; else empty. The
            master keeps no keys: the client fills it in.
    """

    digest: str
    reads: int
    nbytes: int | None = None
    version: int = 0
    key: bytes = b""


class TenantReport(msgspec.Struct, kw_only=True):
    """One tenant since the master started.

    Attributes:
        tenant: its name.
        used_bytes: what its values take, with all replicas.
        quota_bytes: most that they may; None: no bound.
        clients: clients that act for it now.
        hits: keys that its reads have found.
        misses: keys that they have not found.
    """

    tenant: str
    used_bytes: int
    quota_bytes: int | None
    clients: int
    hits: int
    misses: int


class TierReport(msgspec.Struct, kw_only=True):
    """One tier now.

    Attributes:
        tier: its lasting name.
        owners: engines of the clients that have it open; without any it is away.
        records: values in it, also in memory or not.
        value_bytes: what they have.
    """

    tier: str
    owners: list[str]
    records: int
    value_bytes: int


class StoreReport(Reply, kw_only=True):
    """A store at one moment.

    Attributes:
        epoch: the master's.
        now_s: the master's monotonic clock: differences between two reports are times.
        stats: the numbers of the whole store.
        segments: each segment.
        hot: the most read objects, most read first.
        tenants: each tenant.
        tiers: each tier that was mounted since the master started.
        requests: how long the master worked on its requests, by their name.
    """

    epoch: int
    now_s: float
    stats: StoreStats
    segments: list[SegmentReport]
    hot: list[HotObject]
    tenants: list[TenantReport]
    tiers: list[TierReport]
    requests: dict[str, Latency]


REQUESTS: tuple[type[Request], ...] = (GetReport,)
REPLIES: tuple[type[Reply], ...] = (StoreReport,)
