"""Objects come back from the ledgers of their owners after a master was lost."""

from __future__ import annotations

import logging

from mooncake_store import protocol
from mooncake_store.master.context import Group, Handler, MasterContext
from mooncake_store.master.members import Member
from mooncake_store.protocol import Reply, Request

__all__ = ["Adoption"]

# For how long what has left is remembered, so that a late ledger does not bring it back: owners come as soon
# as they have heard of the new master.
REMEMBERED_TTLS = 10

log = logging.getLogger(__name__)


class Adoption(Group):
    """Adopt."""

    def __init__(self, context: MasterContext) -> None:
        super().__init__(context)
        self._adopted = 0
        self._remembers = context.config.recovery
        self._remembers_until_s: float | None = None
        if self._remembers:
            context.map.await_ledgers()

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {protocol.Adopt: self._adopt}

    def on_tick(self, now_s: float) -> None:
        """An owner that has not come by now is taken for dead: objects do not wait for its word any more."""
        self._forget_what_left(now_s)
        end_s = self.context.adoption_ends_s
        if end_s is not None and now_s >= end_s:
            self.context.adoption_ends_s = None
            self.context.map.end_adoption()

    def _forget_what_left(self, now_s: float) -> None:
        """After a while an owner that has not come is taken for dead, and what it would tell for lost."""
        if not self._remembers:
            return
        if self._remembers_until_s is None:
            self._remembers_until_s = now_s + REMEMBERED_TTLS * self.context.config.client_ttl_s
        if now_s >= self._remembers_until_s and self.context.adoption_ends_s is None:
            self._remembers = False
            self.context.map.end_ledgers()

    def next_deadline_s(self) -> float | None:
        """See Group."""
        return self.context.adoption_ends_s

    def numbers(self) -> dict[str, int]:
        """See Group."""
        return {"adopted": self._adopted}

    def _adopt(self, request: protocol.Adopt, member: Member, now_s: float) -> Reply:
        if not member.adopting:
            return protocol.Stale(
                epoch=self.context.epoch, reason="the segment was not mounted to be adopted"
            )
        adopted, waiting, refused = self.context.map.adopt(member.segment, request.frames, now_s)
        self._adopted += adopted
        self.context.adoption_ends_s = now_s + self.context.config.client_ttl_s
        member.adopted += adopted
        if request.last:
            member.adopting = False
            self.context.map.open_segment(member.segment, not member.draining)
            log.info("adopted client=%016x objects=%d", member.client, member.adopted)
        return protocol.Adopted(adopted=adopted, waiting=waiting, refused=refused)
