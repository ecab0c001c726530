"""Replicas beside those that puts make: for lost ones, for hot keys, and because a segment is to be empty.

The master plans and books, owners move: see ``protocol.copies``. A copy's room is reserved as that of a put
is. When its mover dies or fails, it stays out of use as that of a late writer does, see ``Fences``.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mooncake_store import protocol
from mooncake_store._core import Grant, GrantTable
from mooncake_store.master.context import Group, Handler, MasterContext
from mooncake_store.master.draining import DrainingSegment
from mooncake_store.master.members import Member
from mooncake_store.master.objects import SLOT_BYTES, Objects
from mooncake_store.parts import SEGMENT
from mooncake_store.protocol import CopyOutcome, Reply, Request
from mooncake_store.protocol.copies import SINCE_MINOR

__all__ = ["Copies"]

NO_SLOT = 2**32 - 1
JOB_TTL_S = 120.0
MOST_JOBS = 10_000
MOST_COPIES = 1024  # in one answer
MOST_ORDERS = 4096  # waiting for their movers, of replicas that are missing
# Those that could not be replaced are tried again after everything else, and after this time.
MEND_PAUSE_S = 5.0
DONE = (CopyOutcome.STORED, CopyOutcome.THERE)


@dataclass(slots=True)
class _Order:
    """One replica to make. ``job``: and to report; ``drain``: of a segment that is to be empty."""

    at: int
    version: int
    target: int = 0
    leaving: int = 0
    evicts: bool = False
    bounded: bool = False
    job: _Job | None = None
    position: int = 0
    drain: DrainingSegment | None = None
    nbytes: int = 0
    room: bytes = b""  # its rows


class _Begun(NamedTuple):
    """A copy with a slot of its own, where it is copied from, and all segments; see ``copy_begin``."""

    order: _Order
    slot: int
    source: bytes
    segments: list[int]


@dataclass(slots=True)
class _Job:
    """Copies that a client has asked for. ``replicas``: so many in all, else each has an order."""

    client: int
    digests: bytes
    outcomes: bytearray
    deadline_s: float
    replicas: int = 0
    refs: list[tuple[int, int]] = field(default_factory=list)


class Copies(Group):
    """AskCopies, LookAfterCopies, FindReplicas, Drain, TakeCopies and EndCopies."""

    def __init__(self, context: MasterContext) -> None:
        super().__init__(context)
        self._map = context.map
        self._orders: defaultdict[int, deque[_Order]] = defaultdict(deque)  # by number of the mover
        self._grants = GrantTable(context.config.reservation_ttl_s)
        self._granted: dict[int, list[_Order]] = {}
        self._exposed: list[tuple[float, bytes]] = []  # see Objects
        self._jobs: dict[int, _Job] = {}
        self._last_job = 0
        # Replicas asked for, by slot and version: what became of the last try.
        self._asked: dict[tuple[int, int], CopyOutcome] = {}
        self._asking: Counter[tuple[int, int]] = Counter()  # how many jobs know each of them
        self._drains: dict[int, DrainingSegment] = {}  # by client
        # By number of the mover: segments that it could not write to, and until when others come first.
        self._avoided: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._to_try = 0  # of what lacks replicas, until the next pause
        self._pause_until_s = 0.0

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {
            protocol.AskCopies: self._ask,
            protocol.LookAfterCopies: self._look,
            protocol.FindReplicas: self._find,
            protocol.Drain: self._drain,
            protocol.TakeCopies: self._take,
            protocol.EndCopies: self._end,
        }

    def numbers(self) -> dict[str, int]:
        """See Group."""
        return {
            "copied": self._map.copied,
            "corrupt": self._map.corrupt,
            "lacking_replicas": self._map.to_mend,
        }

    def on_join(self, request: protocol.Mount, member: Member, now_s: float) -> None:
        """An owner that was draining its segment goes on with it at this master; others make new room."""
        self._pause_until_s = 0.0
        if request.draining and member.segment:
            self._start_drain(member)

    def on_drop(self, member: Member, *, left: bool) -> None:
        """What it was copying may still be written: given up at the deadline, see ``Fences``."""
        self._pause_until_s = 0.0
        for grant in self._grants.take_all(member.client):
            self._exposed.append((grant.deadline_s, grant.slots))
            for slot, order in self._of(grant):
                self._map.copy_give_up(slot)
                self._tell(order, CopyOutcome.LOST)
        for order in self._orders.pop(member.number, ()):
            self._tell(order, CopyOutcome.LOST)
        self._avoided.pop(member.number, None)
        self._drains.pop(member.client, None)

    def on_tick(self, now_s: float) -> None:
        """See Group."""
        for grant in self._grants.take_expired(now_s):
            for slot, order in self._of(grant):
                self._map.copy_give_up(slot)
                self._tell(order, CopyOutcome.FAILED)
            self.context.fences.give_up(grant.slots, grant.deadline_s)
        over = [one for one in self._exposed if one[0] <= now_s]
        self._exposed = [one for one in self._exposed if one[0] > now_s]
        for deadline_s, slots in over:
            self.context.fences.give_up(slots, deadline_s)
        for number in [number for number, job in self._jobs.items() if job.deadline_s <= now_s]:
            self._forget(number)
        self._plan(now_s)

    def next_deadline_s(self) -> float | None:
        """See Group."""
        deadlines = [deadline_s for deadline_s, _ in self._exposed]
        first = self._grants.first_deadline_s
        return min([*deadlines, first] if first is not None else deadlines, default=None)

    # ---- what is asked for

    def _ask(self, request: protocol.AskCopies, member: Member, now_s: float) -> Reply:
        where = self._map.whereabouts(request.digests)
        job = _Job(member.client, request.digests, bytearray(len(where)), now_s + JOB_TTL_S, request.replicas)
        self._last_job += 1
        self._jobs[self._last_job] = job
        if len(self._jobs) > MOST_JOBS:
            self._forget(next(iter(self._jobs)))
        if request.replicas:
            self._map.want(request.digests, request.replicas)
            job.refs = [(at, version) for at, version, *_ in where]
            self._asked |= {ref: CopyOutcome.PENDING for ref in job.refs if ref[0] != NO_SLOT}
            self._asking.update(job.refs)
            self._pause_until_s = 0.0
            self._plan(now_s)
        else:
            for position, (at, version, mover, _, segments) in enumerate(where):
                order = _Order(at, version, request.target, request.source, bounded=not request.source)
                order.job, order.position = job, position
                self._order_copy(order, mover, segments)
        return self._answer(self._last_job, job)

    def _order_copy(self, order: _Order, mover: int, segments: list[int]) -> None:
        """One in a segment of the asker's choice."""
        if order.at == NO_SLOT:
            return self._tell(order, CopyOutcome.GONE)
        if order.leaving and order.leaving not in segments:
            return self._tell(order, CopyOutcome.GONE)
        if order.target in segments or not segments:
            return self._tell(order, self._there(order))
        if order.target not in self.context.descriptors:
            return self._tell(order, CopyOutcome.NOWHERE)
        self._put(order, mover)

    def _there(self, order: _Order) -> CopyOutcome:
        """The target has it: what moves leaves its source, but for a target that is to be empty, too."""
        leaves = order.job is None or not order.leaving or order.leaving == order.target
        if leaves or self._map.relinquish(order.at, order.version, order.leaving):
            return CopyOutcome.THERE
        return CopyOutcome.NOWHERE

    def _look(self, request: protocol.LookAfterCopies, member: Member, now_s: float) -> Reply:
        job = self._jobs.get(request.job)
        if job is None or job.client != member.client:
            return protocol.CopiesAsked(job=request.job, outcomes=b"")
        job.deadline_s = now_s + JOB_TTL_S
        return self._answer(request.job, job)

    def _answer(self, number: int, job: _Job) -> Reply:
        if job.replicas:
            found = zip(self._map.whereabouts(job.digests), job.refs, strict=True)
            job.outcomes[:] = [
                CopyOutcome.GONE
                if at == NO_SLOT or (at, version) != ref
                else CopyOutcome.STORED
                if replicas >= job.replicas or not segments
                else self._asked.get(ref, CopyOutcome.PENDING)
                for (at, version, _, replicas, segments), ref in found
            ]
        return protocol.CopiesAsked(job=number, outcomes=bytes(job.outcomes))

    def _forget(self, number: int) -> None:
        for ref in self._jobs.pop(number).refs:
            self._asking[ref] -= 1
            if not self._asking[ref]:
                del self._asking[ref]
                self._asked.pop(ref, None)

    def _find(self, request: protocol.FindReplicas, member: Member, now_s: float) -> Reply:
        where = self._map.whereabouts(request.digests)
        return protocol.Replicas(segments=[None if one[0] == NO_SLOT else one[4] for one in where])

    # ---- segments that are to be empty

    def _drain(self, request: protocol.Drain, member: Member, now_s: float) -> Reply:
        wanted = request.segment or member.segment
        owner = next((one for one in self.context.members.all if one.segment == wanted and wanted), None)
        if owner is None:
            return protocol.Drained(segment=wanted, on=False, stuck=True, reasons={"GONE": 1})
        if request.on and not owner.draining:
            self._start_drain(owner)
        elif request.on is False and owner.draining:
            owner.draining = False
            self._drains.pop(owner.client, None)
            self._map.open_segment(owner.segment, not owner.adopting)
            for other in self._drains.values():
                other.look_again()
        drain = self._drains.get(owner.client)
        shown = DrainingSegment.idle(self._map, wanted) if drain is None else drain.report()
        # Other owners may come yet.
        shown.stuck = shown.stuck and self.context.adoption_ends_s is None
        return shown

    def _start_drain(self, owner: Member) -> None:
        owner.draining = True
        self._map.open_segment(owner.segment, False)
        objects = next(group for group in self.context.groups if isinstance(group, Objects))
        too_old = owner.minor < SINCE_MINOR
        self._drains[owner.client] = DrainingSegment(
            self._map, objects, self.context.fences, owner.segment, too_old=too_old
        )
        self._wake(owner)

    # ---- for movers

    def _plan(self, now_s: float) -> None:
        """Have replicas made that are missing, each tried once before any is tried again."""
        if self.context.adoption_ends_s is not None:
            return  # its other owners may yet come with them
        if not self._to_try and now_s >= self._pause_until_s:
            self._to_try, self._pause_until_s = self._map.to_mend, now_s + MEND_PAUSE_S
        waiting = sum(map(len, self._orders.values()))
        most = min(self._to_try, max(0, MOST_ORDERS - waiting))
        self._to_try -= most
        for at, version, mover in self._map.take_mending(most) if most else ():
            asked = (at, version) in self._asked
            self._put(_Order(at, version, evicts=asked, bounded=True), mover)

    def _put(self, order: _Order, mover: int) -> None:
        member = self.context.members.numbered(mover)
        if member is None or member.minor < SINCE_MINOR:
            return self._tell(order, CopyOutcome.NOWHERE)
        self._orders[mover].append(order)
        self._wake(member)

    def _wake(self, member: Member) -> None:
        member.copies = True
        self.context.to_ring.append(member)

    def _waiting(self, member: Member, most_bytes: int, now_s: float) -> Iterator[_Order]:
        """What is asked for first; then what lies in its segment, if that is to be empty."""
        orders = self._orders.get(member.number, deque())
        while orders:
            yield orders.popleft()
        drain = self._drains.get(member.client)
        if drain is not None:
            settled = self.context.adoption_ends_s is None
            for at, version in drain.values(most_bytes, now_s, settled=settled):
                yield _Order(at, version, leaving=member.segment, evicts=True, drain=drain)

    def _take(self, request: protocol.TakeCopies, member: Member, now_s: float) -> Reply:
        begun: list[_Begun] = []
        try:
            for one in self._begin(member, request.most_bytes, now_s):
                begun.append(one)
        finally:  # else nothing would ever end what has begun
            copy = self._grant(member, begun, now_s) if begun else 0
        drain = self._drains.get(member.client)
        more = bool(begun) or bool(self._orders.get(member.number)) or (drain is not None and drain.goes_on)
        member.copies = more or (drain is not None and not drain.report().done)
        segments = {segment for one in begun for segment in one.segments}
        return protocol.CopiesToMake(
            copy=copy,
            versions=_packed([one.order.version for one in begun]),
            sizes=_packed([one.order.nbytes for one in begun]),
            source=protocol.Placement(
                rows=_numbered([one.source for one in begun]),
                segments={segment: self.context.descriptors[segment] for segment in segments},
            ),
            target=protocol.Placement(rows=_numbered([one.order.room for one in begun]), segments={}),
            more=more,
        )

    def _begin(self, member: Member, most_bytes: int, now_s: float) -> Iterator[_Begun]:
        """Copies for one answer, with room for them."""
        nbytes = count = 0
        avoided = self._avoided[member.number]
        for segment in [segment for segment, until_s in avoided.items() if until_s <= now_s]:
            del avoided[segment]
        for order in self._waiting(member, most_bytes, now_s):
            wish = order.target, order.leaving, order.evicts, order.bounded, list(avoided)
            begun = self._map.copy_begin(order.at, order.version, member.number, *wish)
            outcome, slot, size, source, target, segments = begun
            if outcome == CopyOutcome.PENDING:
                order.nbytes, order.room = size, target
                yield _Begun(order, slot, source, segments)
                nbytes, count = nbytes + size, count + 1
                if nbytes >= most_bytes or count == MOST_COPIES:
                    return
            elif outcome == CopyOutcome.THERE:
                self._tell(order, self._there(order))
            else:
                self._tell(order, CopyOutcome(outcome))

    def _grant(self, member: Member, begun: list[_Begun], now_s: float) -> int:
        slots = b"".join(one.slot.to_bytes(SLOT_BYTES, "little") for one in begun)
        copy = self._grants.grant(member.client, slots, now_s).id
        self._granted[copy] = [one.order for one in begun]
        return copy

    def _end(self, request: protocol.EndCopies, member: Member, now_s: float) -> Reply:
        grant = self._grants.take(request.copy, member.client)
        if grant is None:
            return protocol.CopiesEnded(outcomes=bytes([CopyOutcome.LOST]) * len(request.keys))
        failed, outcomes = set(request.failed), bytearray()
        for position, (slot, order) in enumerate(self._of(grant)):
            if position in failed or position >= len(request.keys):
                self._map.copy_give_up(slot)
                self._exposed.append((grant.deadline_s, slot.to_bytes(SLOT_BYTES, "little")))
                outcome = CopyOutcome.FAILED
                if position < len(request.keys) and request.keys[position]:  # its bytes were to be moved
                    self._avoid(order, member, now_s)
            else:
                outcome = CopyOutcome(self._map.copy_end(slot, request.keys[position], now_s))
            outcomes.append(outcome)
            self._tell(order, outcome)
        self._plan(now_s)
        return protocol.CopiesEnded(outcomes=bytes(outcomes))

    def _avoid(self, order: _Order, member: Member, now_s: float) -> None:
        """Others are tried before the target of this copy, until it is known to have gone, if it has."""
        until_s = now_s + self.context.config.client_ttl_s
        for row in np.frombuffer(order.room, dtype="<u8").reshape(-1, 5).tolist():
            self._avoided[member.number][row[SEGMENT]] = until_s

    def _of(self, grant: Grant) -> list[tuple[int, _Order]]:
        slots = np.frombuffer(grant.slots, dtype="<u4").tolist()
        return list(zip(slots, self._granted.pop(grant.id), strict=True))

    def _tell(self, order: _Order, outcome: CopyOutcome) -> None:
        """Who ordered it learns what became of it."""
        if order.drain is not None:
            order.drain.ended(order.at, order.version, order.nbytes, outcome)
        elif order.job is not None:
            order.job.outcomes[order.position] = outcome
        else:
            ref = (order.at, order.version)
            if ref in self._asked:
                self._asked[ref] = CopyOutcome.PENDING if outcome == CopyOutcome.STORED else outcome
            self._map.mended(*ref)
            # The next one of an object that lacks several does not wait for others.
            self._to_try += outcome in DONE


def _packed(values: list[int]) -> bytes:
    return np.array(values, dtype="<u8").tobytes()


def _numbered(rows: list[bytes]) -> bytes:
    """The rows of all, each with its position."""
    numbered = []
    for position, packed in enumerate(rows):
        one = np.frombuffer(packed, dtype="<u8").reshape(-1, 5).copy()
        one[:, 0] = position
        numbered.append(one.tobytes())
    return b"".join(numbered)
