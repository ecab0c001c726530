"""What lies in tiers, beside what lies in memory."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mooncake_store import protocol
from mooncake_store.keys import DIGEST_BYTES
from mooncake_store.master.context import Group, Handler, MasterContext
from mooncake_store.master.members import Member
from mooncake_store.protocol import Outcome, Reply, Request, TierReport, tiers

__all__ = ["Tiering"]

MAX_QUEUED = 100_000
NOBODYS = bytes(DIGEST_BYTES)  # no key has this digest
# Keys of values that may be written to tiers; who is not among the last so many put is not.
MAX_KEYS = 1_000_000
# Values come back into memory only where that makes nothing else leave.
FREE_TO_PROMOTE = 0.01

log = logging.getLogger(__name__)


class Where(NamedTuple):
    """A record: which tier, which version, how large."""

    tier: int
    epoch: int
    version: int
    nbytes: int


@dataclass(slots=True)
class _Tier:
    """One tier that was mounted since this master began. Without owners it is away, and not forgotten."""

    owners: dict[int, str] = field(default_factory=dict)
    drops: deque[tuple[bytes, int, int]] = field(default_factory=deque)
    adopting: bool = True  # nobody has had it open before
    records: int = 0
    value_bytes: int = 0

    def count(self, where: Where, sign: int) -> None:
        """A record is there, or not any more."""
        self.records += sign
        self.value_bytes += sign * where.nbytes


@dataclass(slots=True)
class _Owner:
    """A member with tiers, and what it is to write into them: digests of values in its segment."""

    tiers: list[int]
    touches: int
    queue: deque[bytes] = field(default_factory=deque)


class Placed(NamedTuple):
    """A reservation: its values, until when it may be committed, and which records it promotes."""

    digests: list[bytes]
    keys: list[bytes]
    segments: list[int]
    deadline_s: float
    promoted: list[tuple[int, int]]


class Tiering(Group):
    """Which tier has which value; what is written to tiers, and what readers are told.

    A value that was replaced or removed is out of date in every tier at once, whether its owner is there or
    not: only what is entered here is ever given to readers. It goes around the handlers of Objects.
    """

    def __init__(self, context: MasterContext) -> None:
        super().__init__(context)
        self._tiers: dict[int, _Tier] = {}
        self._numbers: dict[str, int] = {}
        self._owners: dict[int, _Owner] = {}
        self._segments: dict[int, int] = {}
        self._where: dict[bytes, tuple[Where, ...]] = {}
        self._tenants: dict[bytes, str] = {}  # of what is there, as far as it is known
        self._tickets: dict[bytes, tuple[int, int]] = {}  # version, and the client that is to write it
        self._keys: OrderedDict[bytes, tuple[bytes, str]] = OrderedDict()  # and whose it is
        self._last_ticket = 0
        self._quiet_until_s = float("inf")
        self._placed: dict[int, Placed] = {}
        self._exist: Handler | None = None

    def handlers(self) -> dict[type[Request], Handler]:
        """See Group."""
        return {
            tiers.MountTiers: self._mount,
            tiers.AdoptRecords: self._adopt,
            tiers.TakeOffloads: self._take_offloads,
            tiers.Offloaded: self._offloaded,
            tiers.RecordsLost: self._lost,
        }

    def around(self) -> dict[type[Request], Callable[[Handler], Handler]]:
        """See Group."""
        return {
            protocol.Reserve: lambda inner: lambda *asked: self._reserve(inner, *asked),
            protocol.Commit: lambda inner: lambda *asked: self._commit(inner, *asked),
            protocol.Locate: lambda inner: lambda *asked: self._locate(inner, *asked),
            protocol.Exist: self._around_exist,
            protocol.RemoveAll: lambda inner: lambda *asked: self._remove_all(inner, *asked),
            protocol.Remove: lambda inner: lambda *asked: self._remove(inner, *asked),
        }

    def on_drop(self, member: Member, *, left: bool) -> None:
        """Its tiers are away, with what they hold."""
        self._unmount(member.client)

    def on_tick(self, now_s: float) -> None:
        """See Group."""
        for reservation in [id for id, placed in self._placed.items() if placed.deadline_s < now_s]:
            del self._placed[reservation]
        self._admit_touched(now_s)

    def _admit_touched(self, now_s: float) -> None:
        """What was read without this group's knowledge was touched, too."""
        for digest, segment in self.context.desk.take_touches():
            self._admit(digest, segment, 2, now_s)

    # ---- what owners ask

    def _mount(self, request: tiers.MountTiers, member: Member, now_s: float) -> Reply:
        self.context.desk.note_touches()  # it knows nothing of what is around the handlers of Objects here
        self._unmount(member.client)
        if not self._tiers:
            # Reservations of before are not known here, and could make what is written now out of date.
            self._quiet_until_s = now_s + self.context.config.reservation_ttl_s
            if not self._placed_before():
                self._quiet_until_s = now_s
        numbers = []
        for name, _ in request.tiers:
            number = self._numbers.setdefault(name, len(self._numbers) + 1)
            self._tiers.setdefault(number, _Tier()).owners[member.client] = request.address
            numbers.append(number)
        self._owners[member.client] = _Owner(numbers, request.touches)
        if member.segment:
            self._segments[member.segment] = member.client
        return tiers.TiersMounted(tiers=numbers)

    def _placed_before(self) -> bool:
        return bool(self.context.stats().reservations)

    def _unmount(self, client: int) -> None:
        if self._owners.pop(client, None) is None:
            return
        self._segments = {segment: owner for segment, owner in self._segments.items() if owner != client}
        for tier in self._tiers.values():
            tier.owners.pop(client, None)
        for digest in [digest for digest, ticket in self._tickets.items() if ticket[1] == client]:
            del self._tickets[digest]

    def _adopt(self, request: tiers.AdoptRecords, member: Member, now_s: float) -> Reply:
        digests = _split(request.digests)
        if not self._has_open(member, request.tier):
            return tiers.RecordsTaken(taken=bytes(len(digests)))
        tier = self._tiers[request.tier]
        in_memory = self._in_memory(request.digests, member, now_s)
        taken = bytearray()
        tenants: list[str | None] = [*request.tenants] or [None] * len(digests)
        asked = zip(digests, _rows(request.numbers, 3), in_memory, tenants, strict=True)
        for digest, numbers, there, tenant in asked:
            where = Where(request.tier, *numbers)
            known = self._where.get(digest, ())
            # What this master has seen this tier with is known exactly. Of one that is new to it, everything
            # is taken that says nothing else than memory and other tiers do.
            good = where in known or (tier.adopting and not there and _is_youngest(where, known))
            if good and where not in known:
                self._enter(digest, where, tenant)
            taken.append(good)
        return tiers.RecordsTaken(taken=bytes(taken))

    def _take_offloads(self, request: tiers.TakeOffloads, member: Member, now_s: float) -> Reply:
        owner = self._owners.get(member.client)
        if owner is None:
            return tiers.Offloads(mounted=False, digests=b"", keys=[], versions=b"", drop=[])
        self._admit_touched(now_s)
        drop = []
        for number in owner.tiers:
            tier = self._tiers[number]
            tier.adopting = False  # who asks this has adopted
            drop += [(number, *item) for item in tier.drops]
            tier.drops.clear()
        digests: list[bytes] = []
        keys: list[tuple[bytes, str]] = []
        versions: list[int] = []
        while owner.queue and len(digests) < request.most:
            digest = owner.queue.popleft()
            ticket, key = self._tickets.get(digest), self._keys.get(digest)
            if ticket is not None and key is not None:
                digests.append(digest)
                keys.append(key)
                versions.append(ticket[0])
        packed = np.array(versions, dtype="<u8").tobytes()
        return tiers.Offloads(mounted=True, digests=b"".join(digests), keys=keys, versions=packed, drop=drop)

    def _offloaded(self, request: tiers.Offloaded, member: Member, now_s: float) -> Reply:
        taken = bytearray()
        for digest, numbers in zip(_split(request.digests), _rows(request.numbers, 3), strict=True):
            where = Where(request.tier, *numbers)
            # The ticket is gone when the value was replaced or removed since it was given out.
            good = self._has_open(member, where.tier) and where.epoch == self.context.epoch
            good = good and self._tickets.get(digest) == (
                where.version,
                member.client,
            )
            if good:
                self._enter(digest, where, self._keys.get(digest, (b"", None))[1])
            taken.append(good)
        for digest in _split(request.done):
            self._tickets.pop(digest, None)
        return tiers.RecordsTaken(taken=bytes(taken))

    def _has_open(self, member: Member, tier: int) -> bool:
        return tier in self._tiers and member.client in self._tiers[tier].owners

    def _lost(self, request: tiers.RecordsLost, member: Member, now_s: float) -> Reply:
        if not self._has_open(member, request.tier):
            return protocol.Done()
        for digest, numbers in zip(_split(request.digests), _rows(request.numbers, 3), strict=True):
            epoch, version, _ = numbers
            known = self._where.get(digest, ())
            left = tuple(where for where in known if where[:3] != (request.tier, epoch, version))
            for where in known:
                if where not in left:
                    self._tiers[where.tier].count(where, -1)
            if left:
                self._where[digest] = left
            else:
                self._where.pop(digest, None)
                self._tenants.pop(digest, None)
        return protocol.Done()

    # ---- what goes around the handlers of Objects

    def _locate(self, inner: Handler, request: protocol.Locate, member: Member, now_s: float) -> Reply:
        reply = inner(request, member, now_s)
        if not self._tiers or not isinstance(reply, protocol.Located):
            return reply
        digests = _split(request.digests)
        if b"\0" in reply.found and self._where:
            reply.tiered = self._tiered(digests, reply.found)
        for position, inside, segment, *_ in _rows(reply.placement.rows, 5):
            if not inside:
                self._admit(digests[position], segment, 2, now_s)
        return reply

    def _tiered(self, digests: list[bytes], found: bytes) -> tiers.Tiered | None:
        rows: list[int] = []
        for position, (digest, there) in enumerate(zip(digests, found, strict=True)):
            where = None if there else self._reachable(digest)
            if where is not None:
                rows += (position, *where)
        named = set(rows[1::5])
        if not rows:
            return None
        owners = {number: list(self._tiers[number].owners.items()) for number in named}
        return tiers.Tiered(rows=np.array(rows, dtype="<u8").tobytes(), owners=owners)

    def _reachable(self, digest: bytes) -> Where | None:
        known = self._where.get(digest, ())
        return next((where for where in known if self._tiers[where.tier].owners), None)

    def _admit(self, digest: bytes, segment: int, touches: int, now_s: float) -> None:
        """A value was touched so often: the owner of its first byte may write it to its tiers."""
        client = self._segments.get(segment, 0)
        owner = self._owners.get(client)
        if owner is None or owner.touches > touches or len(owner.queue) >= MAX_QUEUED:
            return
        if now_s >= self._quiet_until_s and digest not in self._tickets and digest not in self._where:
            # Rising, as versions are, and not to be guessed: who names one may have the record read.
            self._last_ticket += 1
            self._tickets[digest] = (self._last_ticket << 32 | secrets.randbits(32), client)
            owner.queue.append(digest)

    def _reserve(self, inner: Handler, request: protocol.Reserve, member: Member, now_s: float) -> Reply:
        if not self._tiers:
            return inner(request, member, now_s)
        digests = _split(request.digests)
        if request.promoted:
            return self._promote(inner, request, digests, member, now_s)
        only_in_tiers: list[int] = []
        if request.if_exists != "replace" and self._where:
            in_memory = self._in_memory(request.digests, member, now_s)
            only_in_tiers = [
                i for i, digest in enumerate(digests) if not in_memory[i] and self._reachable(digest)
            ]
        reply = _without(inner, request, only_in_tiers, member, now_s)
        self._note(reply, request, [], now_s)
        return reply

    def _promote(
        self,
        inner: Handler,
        request: protocol.Reserve,
        digests: list[bytes],
        member: Member,
        now_s: float,
    ) -> Reply:
        stats = self.context.stats()
        sizes = int(np.frombuffer(request.sizes, dtype="<u8").sum())
        if stats.free_bytes - sizes < FREE_TO_PROMOTE * stats.capacity_bytes:
            return _nothing_placed(len(digests), Outcome.FULL)
        reply = inner(request, member, now_s)
        self._note(reply, request, [(row[0], row[1]) for row in _rows(request.promoted, 2)], now_s)
        return reply

    def _note(
        self, reply: Reply, request: protocol.Reserve, promoted: list[tuple[int, int]], now_s: float
    ) -> None:
        if not isinstance(reply, protocol.Reserved) or not reply.reservation:
            return
        digests = _split(request.digests)
        placed = [i for i, outcome in enumerate(reply.outcomes) if outcome == Outcome.PLACED]
        first = {row[0]: row[2] for row in _rows(reply.placement.rows, 5) if not row[1]}
        self._placed[reply.reservation] = Placed(
            [digests[i] for i in placed],
            [request.keys[i] for i in placed],
            [first.get(i, 0) for i in placed],
            now_s + 2 * self.context.config.reservation_ttl_s,
            [promoted[i] for i in placed] if promoted else [],
        )

    def _commit(self, inner: Handler, request: protocol.Commit, member: Member, now_s: float) -> Reply:
        placed = self._placed.pop(request.reservation, None)
        if placed is not None and placed.promoted:
            # What was replaced or removed since it was read from the tier must not come back.
            stale = [
                i
                for i, (digest, version) in enumerate(zip(placed.digests, placed.promoted, strict=True))
                if all(where[1:3] != version for where in self._where.get(digest, ()))
            ]
            request.failed = sorted({*request.failed, *stale})
        reply = inner(request, member, now_s)
        if placed is not None and not placed.promoted and isinstance(reply, protocol.Committed):
            stored = (outcome == Outcome.STORED for outcome in reply.outcomes)
            for digest, key, segment, done in zip(
                placed.digests, placed.keys, placed.segments, stored, strict=False
            ):
                if done:
                    self._forget(digest)
                    self._remember(digest, (key, member.tenant_name))
                    self._admit(digest, segment, 1, now_s)
        return reply

    def _remember(self, digest: bytes, key: tuple[bytes, str]) -> None:
        self._keys[digest] = key
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def _around_exist(self, inner: Handler) -> Handler:
        self._exist = inner

        def exist(request: protocol.Exist, member: Member, now_s: float) -> Reply:
            return self._found_too(inner(request, member, now_s), _split(request.digests))

        return exist

    def _remove(self, inner: Handler, request: protocol.Remove, member: Member, now_s: float) -> Reply:
        digests = _split(request.digests)
        reply = self._found_too(inner(request, member, now_s), digests)
        for digest in digests:
            self._forget(digest)
        return reply

    def _remove_all(self, inner: Handler, request: protocol.RemoveAll, member: Member, now_s: float) -> Reply:
        for digest in list(self._where):
            if self._tenants.get(digest) in (None, member.tenant_name):
                self._forget(digest)
        self._tickets.clear()  # what is being written meanwhile is out of date, whosever it is
        return inner(request, member, now_s)

    def _found_too(self, reply: Reply, digests: list[bytes]) -> Reply:
        if self._where and isinstance(reply, protocol.Found):
            reply.found = bytes(
                there or self._reachable(digest) is not None
                for there, digest in zip(reply.found, digests, strict=True)
            )
        return reply

    def _in_memory(self, digests: bytes, member: Member, now_s: float) -> bytes:
        assert self._exist is not None
        reply = self._exist(protocol.Exist(digests=digests), member, now_s)
        assert isinstance(reply, protocol.Found)
        return reply.found

    def tiers(self) -> list[TierReport]:
        """See Group."""
        names = {number: name for name, number in self._numbers.items()}
        return [
            TierReport(
                tier=names[number],
                owners=list(tier.owners.values()),
                records=tier.records,
                value_bytes=tier.value_bytes,
            )
            for number, tier in self._tiers.items()
        ]

    def own(self, digests: bytes, tenant: str) -> bytes:
        """See Group."""
        if not self._where:
            return digests
        return b"".join(
            digest if digest not in self._where or self._tenants.get(digest) == tenant else NOBODYS
            for digest in _split(digests)
        )

    def _enter(self, digest: bytes, where: Where, tenant: str | None) -> None:
        if tenant is not None:
            self._tenants[digest] = tenant
        self._tiers[where.tier].count(where, 1)
        self._where[digest] = (*self._where.get(digest, ()), where)

    def _forget(self, digest: bytes) -> None:
        """What tiers have of this key is out of date."""
        self._tickets.pop(digest, None)
        self._keys.pop(digest, None)
        self._tenants.pop(digest, None)
        for where in self._where.pop(digest, ()):
            tier = self._tiers[where.tier]
            tier.count(where, -1)
            if tier.owners:
                tier.drops.append((digest, where.epoch, where.version))


def _is_youngest(where: Where, known: tuple[Where, ...]) -> bool:
    return all(other[1:3] <= where[1:3] for other in known)


def _without(
    inner: Handler, request: protocol.Reserve, skipped: list[int], member: Member, now_s: float
) -> Reply:
    """Reserve all but some of a batch, which exist."""
    digests = _split(request.digests)
    if not skipped:
        return inner(request, member, now_s)
    kept = [i for i in range(len(digests)) if i not in set(skipped)]
    if not kept:
        return _nothing_placed(len(digests), Outcome.EXISTS)
    whole = request.digests, request.keys, request.sizes
    sizes = np.frombuffer(request.sizes, dtype="<u8")
    request.digests = b"".join(digests[i] for i in kept)
    request.keys, request.sizes = [request.keys[i] for i in kept], sizes[kept].tobytes()
    try:
        reply = inner(request, member, now_s)
    finally:
        request.digests, request.keys, request.sizes = whole
    if isinstance(reply, protocol.Reserved):
        outcomes = bytearray([Outcome.EXISTS] * len(digests))
        for i, outcome in zip(kept, reply.outcomes, strict=True):
            outcomes[i] = outcome
        reply.outcomes = bytes(outcomes)
        rows = np.frombuffer(reply.placement.rows, dtype="<u8").reshape(-1, 5).copy()
        rows[:, 0] = np.array(kept, dtype="<u8")[rows[:, 0].astype(np.intp)]
        reply.placement.rows = rows.tobytes()
    return reply


def _nothing_placed(count: int, outcome: Outcome) -> protocol.Reserved:
    return protocol.Reserved(
        reservation=0,
        outcomes=bytes([outcome] * count),
        placement=protocol.Placement(rows=b"", segments={}),
        room=(0, 0, 0, 0, 0) if outcome is Outcome.FULL else None,
        wait=False,
    )


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def _rows(packed: bytes, width: int) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(packed, dtype="<u8").reshape(-1, width).tolist()
    return rows
