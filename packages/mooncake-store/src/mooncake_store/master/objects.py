"""Values are put, looked for, read and removed."""

from __future__ import annotations

import logging

import numpy as np

from mooncake_store import protocol
from mooncake_store._core import PutOptions
from mooncake_store._errors import MasterRefused
from mooncake_store.keys import DIGEST_BYTES
from mooncake_store.master.context import Group, Handler, MasterContext
from mooncake_store.master.members import Member
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import Outcome, Reply, Request

__all__ = ["Objects"]

DEFAULT_POLICY = PutPolicy()
SLOT_BYTES = 4
SUM_BYTES = 8
FULL = bytes([Outcome.FULL])
MOST_SEGMENT = (1 << 64) - 1

log = logging.getLogger(__name__)


class Objects(Group):
    """Reserve, Commit, Locate, Release, Exist and Remove: one call of the map for a batch.

    What is usual about all but the last is answered by ``core/desk.cpp``, and in the same way.
    """

    def __init__(self, context: MasterContext) -> None:
        super().__init__(context)
        self._map = context.map
        self._leases, self._reservations = context.leases, context.reservations
        # Given up by writers that may still write for a while: free after the reservation's deadline, when
        # who is late even then has been shut out.
        self._exposed: list[tuple[float, bytes]] = []

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {
            protocol.Reserve: self._reserve,
            protocol.Commit: self._commit,
            protocol.Locate: self._locate,
            protocol.Release: self._release,
            protocol.Exist: self._exist,
            protocol.Remove: self._remove,
            protocol.Renew: self._renew,
        }

    def on_drop(self, member: Member, *, left: bool) -> None:
        """See Group. What it reserved stays exposed to its writes, and is given up at the deadline."""
        for lease in self._leases.take_all(member.client) if left else ():
            self._map.release(lease.slots)
        for reservation in self._reservations.take_all(member.client):
            self._exposed.append((reservation.deadline_s, reservation.slots))

    def on_heartbeat(self, request: protocol.Heartbeat, member: Member, now_s: float) -> None:
        """End the leases it names so."""
        self._end_leases(request.ended, member)

    def on_tick(self, now_s: float) -> None:
        """See Group."""
        for lease in self._leases.take_expired(now_s):
            self._map.release(lease.slots)
        for reservation in self._reservations.take_expired(now_s):
            self.context.fences.give_up(reservation.slots, reservation.deadline_s)
        over = [one for one in self._exposed if one[0] <= now_s]
        if over:
            self._exposed = [one for one in self._exposed if one[0] > now_s]
        for deadline_s, slots in over:
            self.context.fences.give_up(slots, deadline_s)
        self._map.expire_pins(now_s)

    def next_deadline_s(self) -> float | None:
        """See Group."""
        deadlines = [self._leases.first_deadline_s, self._reservations.first_deadline_s]
        deadlines += [deadline_s for deadline_s, _ in self._exposed]
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def numbers(self) -> dict[str, int]:
        """See Group."""
        reads = self.context.desk.reads()
        return {
            "leases": len(self._leases),
            "reservations": len(self._reservations),
            "hits": sum(hits for hits, _ in reads),
            "misses": sum(misses for _, misses in reads),
        }

    @property
    def newest_lease(self) -> int:
        """Id of the last lease given; later ones have higher ids."""
        return self._leases.newest

    def slots_leased_until(self, newest: int) -> list[bytes]:
        """The slots under each lease that was given no later than the one of this id, and has not ended."""
        return self._leases.slots_until(newest)

    def _reserve(self, request: protocol.Reserve, member: Member, now_s: float) -> Reply:
        if len(request.keys) * DIGEST_BYTES != len(request.digests):
            raise MasterRefused(
                f"{len(request.keys)} keys came with {len(request.digests)} bytes of digests, which are "
                f"{DIGEST_BYTES} a key; nothing was reserved"
            )
        self._end_leases(request.ended, member)
        policy = request.policy or DEFAULT_POLICY
        options = PutOptions(
            writer=member.number,
            node=member.node,
            tenant=member.tenant,
            priority=policy.priority,
            replicas=policy.replicas,
            replace=request.if_exists == "replace",
            hard_pin=policy.hard_pin,
            soft_until_s=0.0 if policy.soft_pin_s is None else now_s + policy.soft_pin_s,
            same_node=policy.same_node,
            preferred=list(policy.preferred_segments),
            avoid=request.avoid,
            now_s=now_s,
            stripes=policy.stripes,
        )
        if policy.group or policy.session:
            options.group, options.session = policy.group, policy.session
        outcomes, slots, rows, segments, wait = self._map.reserve(request.digests, request.sizes, options)
        grant = 0
        if slots:
            keys = request.keys
            if len(slots) != SLOT_BYTES * len(outcomes):
                keys = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.PLACED]
            grant = self._reservations.grant(member.client, slots, now_s, keys).id
        return protocol.Reserved(
            reservation=grant,
            outcomes=outcomes,
            placement=self._placement(rows, segments),
            room=self._map.room()[:5] if FULL in outcomes else None,
            wait=wait,
        )

    def _commit(self, request: protocol.Commit, member: Member, now_s: float) -> Reply:
        grant = self._reservations.take(request.reservation, member.client)
        outcomes = b""
        if grant is not None:
            count = len(grant.slots) // SLOT_BYTES
            beyond = [position for position in request.failed if not 0 <= position < count]
            if beyond:
                self._exposed.append((grant.deadline_s, grant.slots))
                raise MasterRefused(
                    f"position {beyond[0]} is to have failed of a reservation of {count} values; none of "
                    f"them was stored"
                )
            if request.sums and len(request.sums) == SUM_BYTES * count:
                self._map.set_sums(grant.slots, request.sums)
            outcomes = self._map.commit(
                grant.slots, request.failed, grant.keys, request.if_exists == "replace", now_s
            )
            if request.failed:
                failed = [
                    grant.slots[SLOT_BYTES * i : SLOT_BYTES * (i + 1)] for i in sorted(set(request.failed))
                ]
                self._exposed.append((grant.deadline_s, b"".join(failed)))
        notices = self.context.read_records(member, request.notices_seen)
        return protocol.Committed(outcomes=outcomes, notices=notices)

    def _renew(self, request: protocol.Renew, member: Member, now_s: float) -> Reply:
        renewed = self._reservations.renew(request.reservation, member.client, now_s)
        return protocol.Found(found=bytes([renewed]))

    def _locate(self, request: protocol.Locate, member: Member, now_s: float) -> Reply:
        self._end_leases(request.ended, member)
        found, sizes, slots, replicas, segments = self._map.locate(
            request.digests, member.number, member.node
        )
        self.context.hot.count(request.digests)
        hits = len(slots) // SLOT_BYTES
        self.context.desk.count(member.tenant, hits, len(found) - hits)
        return protocol.Located(
            lease=self._leases.grant(member.client, slots, now_s).id if hits else 0,
            found=found,
            sizes=sizes,
            placement=self._placement(replicas[0], segments),
            others=replicas[1:],
            sums=self._sums(found, slots) if request.summed else b"",
        )

    def _sums(self, found: bytes, slots: bytes) -> bytes:
        sums = np.zeros(len(found), dtype="<u8")
        sums[np.frombuffer(found, dtype=np.bool_)] = np.frombuffer(self._map.sums(slots), dtype="<u8")
        return bytes(sums.tobytes())

    def _end_leases(self, ended: list[int], member: Member) -> None:
        """End leases whose reads are over, and in time: nobody asks whether they held."""
        for lease in ended:
            grant = self._leases.take(lease, member.client)
            if grant is not None:
                self._map.release(grant.slots)

    def _release(self, request: protocol.Release, member: Member, now_s: float) -> Reply:
        grant = self._leases.take(request.lease, member.client)
        if grant is None:
            return protocol.Released(expired=True, broken=[])
        try:
            self._condemn(grant.slots, request.condemned, member)
        finally:
            broken = self._map.release(grant.slots)
        return protocol.Released(expired=False, broken=broken)

    def _condemn(self, slots: bytes, condemned: list[tuple[int, int]], member: Member) -> None:
        known = np.frombuffer(slots, dtype="<u4").tolist()
        for position, segment in condemned:
            there = 0 <= position < len(known) and 0 <= segment <= MOST_SEGMENT
            if there and self._map.condemn(known[position], segment):
                told = (
                    "client %x read something else than was put from segment %x, which is not read any more"
                )
                log.error(told, member.client, segment)

    def _exist(self, request: protocol.Exist, member: Member, now_s: float) -> Reply:
        return protocol.Found(found=self._map.exist(request.digests))

    def _remove(self, request: protocol.Remove, member: Member, now_s: float) -> Reply:
        return protocol.Found(found=self._map.remove(request.digests))

    def _placement(self, rows: bytes, segments: list[int]) -> protocol.Placement:
        descriptors = self.context.descriptors
        return protocol.Placement(rows=rows, segments={segment: descriptors[segment] for segment in segments})
