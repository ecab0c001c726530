"""How long values stay: pins, sessions, all of a tenant at once; their sizes, and who knows their keys."""

from __future__ import annotations

from mooncake_store import protocol
from mooncake_store.master.context import Group, Handler
from mooncake_store.master.members import Member
from mooncake_store.protocol import Reply, Request
from mooncake_store.tickets import ticket

__all__ = ["Keeping"]


class Keeping(Group):
    """Pin, Unpin, EndSession, RemoveAll, GetSizes and FindOwners."""

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {
            protocol.Pin: self._pin,
            protocol.Unpin: self._unpin,
            protocol.EndSession: self._end_session,
            protocol.RemoveAll: self._remove_all,
            protocol.GetSizes: self._get_sizes,
            protocol.FindOwners: self._find_owners,
        }

    def _pin(self, request: protocol.Pin, member: Member, now_s: float) -> Reply:
        hard = request.soft_pin_s is None
        until_s = now_s + (request.soft_pin_s or 0.0)
        return protocol.Found(found=self.context.map.pin(request.digests, hard, until_s, now_s))

    def _unpin(self, request: protocol.Unpin, member: Member, now_s: float) -> Reply:
        return protocol.Found(found=self.context.map.unpin(request.digests))

    def _end_session(self, request: protocol.EndSession, member: Member, now_s: float) -> Reply:
        return protocol.Counted(count=self.context.map.end_session(member.tenant, request.session))

    def _remove_all(self, request: protocol.RemoveAll, member: Member, now_s: float) -> Reply:
        return protocol.Counted(count=self.context.map.remove_tenant(member.tenant))

    def _get_sizes(self, request: protocol.GetSizes, member: Member, now_s: float) -> Reply:
        return protocol.Sizes(sizes=self.context.map.sizes(request.digests))

    def _find_owners(self, request: protocol.FindOwners, member: Member, now_s: float) -> Reply:
        owners = [owner for owner in self.context.members.all if owner.segment]
        return protocol.Owners(
            owners=[
                (owner.client, owner.reached_at, ticket(owner.secret, member.tenant_name)) for owner in owners
            ]
        )
