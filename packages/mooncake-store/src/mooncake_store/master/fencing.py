"""Owners shut late writers out."""

from __future__ import annotations

from mooncake_store import protocol
from mooncake_store.master.context import Group, Handler
from mooncake_store.master.members import Member
from mooncake_store.protocol import Reply, Request
from mooncake_store.protocol.fencing import SINCE_MINOR

__all__ = ["Fencing"]


class Fencing(Group):
    """Regrant, Fenced and Reach; see ``protocol.fencing`` and :class:`Fences`."""

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {
            protocol.Regrant: self._regrant,
            protocol.Fenced: self._fenced,
            protocol.Reach: self._reach,
        }

    def numbers(self) -> dict[str, int]:
        """See Group."""
        return {"late_reservations": len(self.context.fences)}

    def on_join(self, request: protocol.Mount, member: Member, now_s: float) -> None:
        """See Group."""
        if member.segment and member.minor >= SINCE_MINOR:
            self.context.fences.add(member.segment, request.descriptor, now_s)

    def _regrant(self, request: protocol.Regrant, member: Member, now_s: float) -> Reply:
        if self.context.fences.regrant(member.segment, request.previous, request.descriptor, now_s):
            self.context.descriptors[member.segment] = request.descriptor
            self.context.desk.describe(member.segment, request.descriptor)
        return protocol.Done()

    def _fenced(self, request: protocol.Fenced, member: Member, now_s: float) -> Reply:
        self.context.fences.fenced(member.segment, request.descriptor)
        return protocol.Done()

    def _reach(self, request: protocol.Reach, member: Member, now_s: float) -> Reply:
        return protocol.Reached(
            descriptors=[self.context.fences.successor(one) for one in request.descriptors]
        )
