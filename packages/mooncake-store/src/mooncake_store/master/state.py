"""What a master decides, without clock, threads or network: requests and times go in, replies come out."""

from __future__ import annotations

from mooncake_store import protocol
from mooncake_store.config import StoreConfig
from mooncake_store.master.adoption import Adoption
from mooncake_store.master.context import Group, MasterContext
from mooncake_store.master.copies import Copies
from mooncake_store.master.fencing import Fencing
from mooncake_store.master.joining import Joining
from mooncake_store.master.keeping import Keeping
from mooncake_store.master.limits import Limits
from mooncake_store.master.members import Member
from mooncake_store.master.objects import Objects
from mooncake_store.master.reports import Reports
from mooncake_store.master.statistics import Statistics
from mooncake_store.master.tiering import Tiering
from mooncake_store.protocol import FromMember, Reply, Request, StoreReport, StoreStats

__all__ = ["GROUPS", "MasterState"]

# What handles requests, by topic, besides Joining; each is told of members that go and of time.
GROUPS: tuple[type[Group], ...] = (
    Objects,
    Adoption,
    Keeping,
    Copies,
    Fencing,
    Statistics,
    Reports,
    Tiering,
)


class MasterState:
    """The whole state of one master, from its start to its end. Not thread-safe.

    Every request names the master's epoch, so that nothing meant for an earlier master has an effect here.
    Times are seconds of one clock that never goes back.
    """

    def __init__(self, epoch: int, config: StoreConfig, first_version: int = 1) -> None:
        """``first_version``: number of the first object; a later master's is above all of those before."""
        self.epoch = epoch
        self.config = config
        self.context = MasterContext(epoch, config, first_version)
        self._limits = Limits(config)
        self._joining = Joining(self.context)
        # Joining last: it drops members, and the others then have let end what was over anyway.
        self.context.groups = [*(group(self.context) for group in GROUPS), self._joining]
        self._handlers = {
            request: handler for group in self.context.groups for request, handler in group.handlers().items()
        }
        for group in self.context.groups:
            for request, wrap in group.around().items():
                self._handlers[request] = wrap(self._handlers[request])

    def handle(self, request: Request, connection: int, address: str, now_s: float) -> Reply:
        """Answer one request that came over a connection (0: from this process) of the engine at
        ``address``.
        """
        if isinstance(request, FromMember):
            return self._handle_member(request, connection, now_s)
        assert isinstance(request, protocol.Mount), f"{type(request).__name__} has no handler"
        return self._joining.mount(request, connection, address, now_s)

    def on_connection_lost(self, connection: int) -> None:
        """A client's connection has ended: its segment and reservations are void."""
        for member in self.context.members.on_connection(connection):
            self.context.drop(member, "its connection ended")

    def on_tick(self, now_s: float) -> None:
        """Let end what has passed its deadline. To be called about every second, or when
        :meth:`next_deadline_s`.
        """
        self.context.settle()
        for group in self.context.groups:
            group.on_tick(now_s)

    def next_deadline_s(self) -> float | None:
        """When the next lease or reservation expires unless renewed."""
        deadlines = [group.next_deadline_s() for group in self.context.groups]
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def take_to_ring(self) -> list[Member]:
        """Members to be told that notices wait for them, each once."""
        numbers = [*self.context.map.take_rings(), *self.context.desk.take_rings()]
        found = [self.context.members.numbered(number) for number in numbers]
        ringing = {member.number: member for member in [*found, *self.context.to_ring] if member is not None}
        self.context.to_ring.clear()
        return list(ringing.values())

    def stats(self) -> StoreStats:
        """The store's numbers."""
        return self.context.stats()

    def report(self, hot: int, now_s: float) -> StoreReport:
        """Everything that is shown of the store, with so many of the most read objects."""
        (reports,) = (group for group in self.context.groups if isinstance(group, Reports))
        return reports.report(hot, now_s)

    def own(self, digests: bytes, tenant: str) -> bytes:
        """The digests, with zeros in place of those whose objects are another tenant's."""
        digests = self.context.map.own(digests, self.context.map.tenant(tenant))
        for group in self.context.groups:
            digests = group.own(digests, tenant)
        return digests

    def _handle_member(self, request: FromMember, connection: int, now_s: float) -> Reply:
        if request.epoch != self.epoch:
            return protocol.Stale(epoch=self.epoch, reason="the master has been started anew")
        member = self.context.members.get(request.client)
        if member is None or member.connection != connection:
            return protocol.Stale(epoch=self.epoch, reason="the master has lost the connection meanwhile")
        member.heard_s = now_s
        retry_after_s = self._limits.refuse(request, member, now_s)
        if retry_after_s is not None:
            return protocol.Limited(retry_after_s=retry_after_s)
        return self._handlers[type(request)](request, member, now_s)
