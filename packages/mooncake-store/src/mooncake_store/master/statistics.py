"""The store's numbers."""

from __future__ import annotations

from mooncake_store import protocol
from mooncake_store.master.context import Group, Handler
from mooncake_store.master.members import Member
from mooncake_store.protocol import Reply, Request

__all__ = ["Statistics"]


class Statistics(Group):
    """GetStats."""

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {protocol.GetStats: self._get_stats}

    def _get_stats(self, request: protocol.GetStats, member: Member, now_s: float) -> Reply:
        return self.context.stats()
