"""Members come, stay and go."""

from __future__ import annotations

import logging
import secrets

from mooncake_store import protocol
from mooncake_store.keys import object_prefix
from mooncake_store.master.context import Group, Handler
from mooncake_store.master.members import LOCAL, Member
from mooncake_store.protocol import Reply, Request
from mooncake_store.protocol.versions import FEATURES, MINORS, agree

__all__ = ["Joining"]

log = logging.getLogger(__name__)


class Joining(Group):
    """Mount, Heartbeat and Unmount."""

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {protocol.Unmount: self._unmount, protocol.Heartbeat: self._heartbeat}

    def numbers(self) -> dict[str, int]:
        """See Group."""
        return {"clients": len(self.context.members)}

    def mount(self, request: protocol.Mount, connection: int, address: str, now_s: float) -> Reply:
        """Take a client in; a client of this id has left before. Raises ProtocolMismatch."""
        context, config = self.context, self.context.config
        minor = agree(request.minors, MINORS)
        before = context.members.get(request.client)
        if before is not None:
            context.drop(before, "it joined again")
        member = Member(request.client, connection, address, now_s, node=request.node)
        member.tenant, member.tenant_name = context.map.tenant(request.tenant), request.tenant
        member.reached_at, member.secret = request.address or address, secrets.token_bytes(16)
        member.minor = minor
        context.members.add(member)
        context.map.add_member(member.number)
        if request.nbytes:
            # An owner in this process, too: of a cluster, another process may lead next.
            confirms = config.recovery
            context.map.start_above(request.last_version)
            context.map.add_segment(request.segment, member.number, member.node, request.nbytes, confirms)
            if request.keeps and config.recovery:
                # Nothing new is placed where something may turn out to lie.
                context.map.open_segment(request.segment, False)
                member.adopting = True
            context.descriptors[request.segment] = request.descriptor
            context.desk.describe(request.segment, request.descriptor)
            member.segment = request.segment
        limits = config.tenants.get(request.tenant)
        unlimited = limits is None or limits.keys_per_s is None
        # Who asks from the master's own process has no connection, and is not asked who it is.
        confined = connection != LOCAL and context.confined(member.client)
        context.desk.admit(
            member.client,
            connection,
            member.number,
            member.node,
            member.tenant,
            express=unlimited,
            own_prefix=object_prefix(request.tenant) if confined else b"",
        )
        for group in context.groups:
            group.on_join(request, member, now_s)
        log.info(
            "joined client=%016x address=%s lends_bytes=%d", member.client, member.address, request.nbytes
        )
        return protocol.Mounted(
            epoch=context.epoch,
            segment=member.segment,
            lease_ttl_s=config.lease_ttl_s,
            reservation_ttl_s=config.reservation_ttl_s,
            minor=minor,
            features=list(FEATURES) if context.desk.is_open else [],
            recovery=config.recovery,
            secret=member.secret,
        )

    def on_tick(self, now_s: float) -> None:
        """Drop members that are silent, or do not take their notices."""
        config = self.context.config
        for member in self.context.members.all:
            heard_s = max(member.heard_s, self.context.desk.heard_s(member.client))
            silent_s, unread = now_s - heard_s, self.context.map.unread(member.number)
            if silent_s > config.client_ttl_s or unread > config.max_unread_notices:
                why = f"it was silent for {silent_s:.1f} s and has {unread} notices unread"
                self.context.drop(member, why)

    def _unmount(self, request: protocol.Unmount, member: Member, now_s: float) -> Reply:
        self.context.drop(member, "it left", left=True)
        return protocol.Done()

    def _heartbeat(self, request: protocol.Heartbeat, member: Member, now_s: float) -> Reply:
        for group in self.context.groups:
            group.on_heartbeat(request, member, now_s)
        leases = self.context.leases
        expired = [lease for lease in request.leases if not leases.renew(lease, member.client, now_s)]
        notices = self.context.read_records(member, request.notices_seen)
        return protocol.Alive(
            notices=notices,
            segments=list(self.context.descriptors),
            copies=member.copies,
            draining=member.draining,
            expired=expired,
            broken=[lease for lease in request.leases if lease in self.context.broken_leases],
            fence=self.context.fences.wanted(member.segment),
        )
