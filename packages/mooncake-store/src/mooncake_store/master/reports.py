"""What is shown of a store."""

from __future__ import annotations

import itertools
from collections import Counter

from mooncake_store import protocol
from mooncake_store.master.context import Group, Handler
from mooncake_store.master.members import Member
from mooncake_store.protocol import HotObject, Reply, Request, SegmentReport, StoreReport, TenantReport

__all__ = ["Reports"]

MISSING = 2**64 - 1
NO_SLOT = 2**32 - 1


class Reports(Group):
    """GetReport."""

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {protocol.GetReport: self._get_report}

    def report(self, hot: int, now_s: float) -> StoreReport:
        """The store now, with so many of the most read objects."""
        context = self.context
        context.settle()
        return StoreReport(
            epoch=context.epoch,
            now_s=now_s,
            stats=context.stats(),
            segments=[self._segment(member) for member in context.members.all if member.segment],
            hot=[self._hot(digest, reads) for digest, reads in context.hot.top(hot)],
            tenants=self._tenants(),
            tiers=[tier for group in context.groups for tier in group.tiers()],
            requests=context.latencies.snapshot(),
        )

    def _get_report(self, request: protocol.GetReport, member: Member, now_s: float) -> Reply:
        return self.report(request.hot, now_s)

    def _segment(self, owner: Member) -> SegmentReport:
        capacity, free, hole, evictable, leased, reserved, kept, retiring, values = (
            self.context.map.segment_room(owner.segment)
        )
        return SegmentReport(
            segment=owner.segment,
            address=owner.address,
            capacity_bytes=capacity,
            free_bytes=free,
            largest_hole_bytes=hole,
            evictable_bytes=evictable,
            leased_bytes=leased,
            reserved_bytes=reserved,
            pinned_bytes=kept,
            retiring_bytes=retiring,
            value_bytes=values,
            draining=owner.draining,
        )

    def _tenants(self) -> list[TenantReport]:
        clients = Counter(member.tenant_name for member in self.context.members.all)
        reads = [*self.context.desk.reads(), *itertools.repeat((0, 0), len(self.context.map.tenants()))]
        return [
            TenantReport(
                tenant=name,
                used_bytes=used,
                quota_bytes=quota or None,
                clients=clients[name],
                hits=hits,
                misses=misses,
            )
            for (name, used, quota), (hits, misses) in zip(self.context.map.tenants(), reads, strict=False)
        ]

    def _hot(self, digest: bytes, reads: int) -> HotObject:
        nbytes = int.from_bytes(self.context.map.sizes(digest), "little")
        ((slot, version, *_),) = self.context.map.whereabouts(digest)
        return HotObject(
            digest=digest.hex(),
            reads=reads,
            nbytes=None if nbytes == MISSING else nbytes,
            version=0 if slot == NO_SLOT else version,
        )
