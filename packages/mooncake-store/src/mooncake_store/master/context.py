"""What all groups of handlers of one master share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mooncake_store._core import Desk, GrantTable, ObjectMap
from mooncake_store.config import StoreConfig
from mooncake_store.eviction import find_eviction
from mooncake_store.master.fences import Fences
from mooncake_store.master.members import Member, Members
from mooncake_store.protocol import Heartbeat, Mount, RecordPage, Reply, Request, StoreStats, TierReport
from mooncake_store.telemetry import HotDigests, Latencies, Latency

__all__ = ["Group", "Handler", "MasterContext"]

# Of one answer; a member asks again while there is more.
MOST_RECORD_BYTES = 8 << 20

Handler = Callable[[Any, Member, float], Reply]

log = logging.getLogger(__name__)


class Group:
    """Handlers of the requests of one topic, with what only they know. Times are seconds of one clock."""

    def __init__(self, context: MasterContext) -> None:
        self.context = context

    def handlers(self) -> dict[type[Request], Handler]:
        """What answers each request of a member, which has joined with this epoch."""
        return {}

    def around(self) -> dict[type[Request], Callable[[Handler], Handler]]:
        """What goes around the handlers of other groups."""
        return {}

    def on_join(self, request: Mount, member: Member, now_s: float) -> None:
        """A member has come."""

    def on_drop(self, member: Member, *, left: bool) -> None:
        """A member is going: end what it was promised. Its segment is still there.

        ``left``: it said so itself, and neither reads nor writes any more.
        """

    def on_heartbeat(self, request: Heartbeat, member: Member, now_s: float) -> None:
        """A member lives."""

    def on_tick(self, now_s: float) -> None:
        """Let end what has passed its deadline."""

    def next_deadline_s(self) -> float | None:
        """When something ends unless renewed."""
        return None

    def tiers(self) -> list[TierReport]:
        """The tiers that this group knows."""
        return []

    def own(self, digests: bytes, tenant: str) -> bytes:
        """The digests, with zeros in place of those whose objects are another tenant's."""
        return digests

    def numbers(self) -> dict[str, int]:
        """Fields of StoreStats that this group counts."""
        return {}


class MasterContext:
    """Objects, segments and members of one master. Not thread-safe.

    Attributes:
        map: what lies where.
        descriptors: of each segment, what others need to reach it through the transfer engine.
        leases: of readers.
        reservations: of writers.
        desk: answers what is usual without the interpreter; whatever it touches is the same as here.
        fences: what late writers may still write to.
        confined: whether a client may see objects of its own tenant only, for the desk; what goes the other
            way has passed the gate.
        groups: what handles requests, by topic.
        to_ring: members to be told that something waits for them.
        broken_leases: those given before an owner went under which something lay in its segment. If it comes
            back, the same memory may have other values. May name some that have ended.
        adoption_ends_s: until then owners may come with what an earlier master had; None: none does.
    """

    def __init__(self, epoch: int, config: StoreConfig, first_version: int) -> None:
        self.epoch = epoch
        self.config = config
        policy = find_eviction(config.eviction)
        self.map = ObjectMap(
            config.granule_bytes, config.evict_reserve_fraction, policy.compiled or policy.make, first_version
        )
        self.members = Members()
        self.hot = HotDigests()
        self.latencies = Latencies()
        self.leases = GrantTable(config.lease_ttl_s)
        self.reservations = GrantTable(config.reservation_ttl_s)
        self.desk = Desk(self.map, self.leases, self.reservations, epoch, MOST_RECORD_BYTES)
        self.fences = Fences(self.map, config.reservation_ttl_s)
        self.descriptors: dict[int, bytes] = {}
        self.confined: Callable[[int], bool] = lambda _: False
        self.groups: list[Group] = []
        self.to_ring: list[Member] = []
        self.broken_leases: set[int] = set()
        self.adoption_ends_s: float | None = None
        for name, limits in config.tenants.items():
            self.map.limit_tenant(self.map.tenant(name), limits.quota_bytes or 0, limits.eviction == "own")

    def drop(self, member: Member, why: str, *, left: bool = False) -> None:
        """Let a member go: its segment and reservations are void. Leases last until their deadline, unless it
        has ``left`` by itself: others may still read, and not know yet that they are members no more.
        """
        log.info("dropped client=%016x address=%s why=%r", member.client, member.address or "local", why)
        self.members.remove(member)
        for group in self.groups:
            group.on_drop(member, left=left)
        if member.segment:
            self._break_leases(member.segment)
            self.fences.drop(member.segment)
            self.map.drop_segment(member.segment)
            del self.descriptors[member.segment]
            self.desk.forget(member.segment)
        self.desk.drop(member.client)
        self.map.drop_member(member.number)

    def _break_leases(self, segment: int) -> None:
        leases = self.leases.all()
        hit = {lease.id for lease in leases if self.map.lies_in(lease.slots, segment)}
        self.broken_leases = hit | self.broken_leases.intersection(lease.id for lease in leases)

    def settle(self) -> None:
        """Count what the desk has answered meanwhile."""
        self.hot.add(self.desk.take_samples())
        for name, count, total_s, buckets in self.desk.take_calls():
            self.latencies.add(name, Latency(count, 0, total_s, buckets))

    def read_records(self, member: Member, seen: int) -> list[RecordPage]:
        """What the member has to be told, after it has confirmed everything up to number ``seen``."""
        self.map.confirm(member.number, seen)
        return self.map.records(member.number, MOST_RECORD_BYTES)

    def stats(self) -> StoreStats:
        """The store's numbers."""
        capacity, free, _, leased, reserved, kept, retiring = self.map.room()
        stored, evicted, removed, lost = self.map.counts()
        numbers = {name: value for group in self.groups for name, value in group.numbers().items()}
        return StoreStats(
            objects=len(self.map),
            capacity_bytes=capacity,
            used_bytes=capacity - free - reserved,
            free_bytes=free,
            leased_bytes=leased,
            reserved_bytes=reserved,
            pinned_bytes=kept,
            retiring_bytes=retiring,
            segments=self.map.segments,
            stored=stored,
            evicted=evicted,
            removed=removed,
            lost=lost,
            **numbers,
        )
