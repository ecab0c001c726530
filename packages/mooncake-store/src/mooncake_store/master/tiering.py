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
from mooncake_store._core import TierRecords
from mooncake_store._errors import MasterRefused
from mooncake_store.keys import DIGEST_BYTES
from mooncake_store.master.context import Group, Handler, MasterContext
from mooncake_store.master.members import Member
from mooncake_store.protocol import Outcome, Reply, Request, TierReport, tiers

__all__ = ["Tiering"]

MAX_QUEUED = 100_000
MAX_TIERS = MAX_ROUND = 0xFFFF
PURGED_AT_ONCE = 500_000
# Keys of values that may be written to tiers; who is not among the last so many put is not.
MAX_KEYS = 1_000_000
# Values come back into memory only where that makes nothing else leave.
FREE_TO_PROMOTE = 0.01

log = logging.getLogger(__name__)


# A record: number of its tier, epoch, version, bytes.
Where = tuple[int, int, int, int]


@dataclass(slots=True)
class _Tier:
    """One tier that was mounted since this master began. Without owners it is away, and not forgotten.

    Attributes:
        shared: several members may have it open at a time.
        drops: what is out of date there, and its owners have not been told yet.
        adopting: nobody has had it open before.
        round: how often it was mounted, if it is not shared: records that were not named since are not there.
    """

    shared: bool
    owners: dict[int, str] = field(default_factory=dict)
    drops: deque[tuple[bytes, int, int]] = field(default_factory=deque)
    adopting: bool = True
    round: int = 0


@dataclass(slots=True)
class _Owner:
    """A member with tiers, and what it is to write into them: digests of values in its segment.

    Attributes:
        unnamed: tiers to be gone through for what it did not name, once it has named all, and from where on.
    """

    tiers: list[int]
    touches: int
    unnamed: deque[tuple[int, int]]
    queue: deque[bytes] = field(default_factory=deque)


class Placed(NamedTuple):
    """A reservation: its values, where each begins, and which records it promotes."""

    digests: list[bytes]
    keys: list[bytes]
    segments: list[int]
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
        self._records = TierRecords()
        self._open: list[int] = []  # tiers that can be read
        self._tickets: dict[bytes, tuple[int, int]] = {}  # version, and the client that is to write it
        self._keys: OrderedDict[bytes, tuple[bytes, str]] = OrderedDict()  # and whose it is
        self._last_ticket = 0
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
        reservations = self.context.reservations
        for ended in [reservation for reservation in self._placed if reservation not in reservations]:
            del self._placed[ended]
        self._admit_touched(now_s)

    def _admit_touched(self, now_s: float) -> None:
        """What was read without this group's knowledge was touched, too."""
        for digest, segment in self.context.desk.take_touches():
            self._admit(digest, segment, 2, now_s)

    # ---- what owners ask

    def _mount(self, request: tiers.MountTiers, member: Member, now_s: float) -> Reply:
        self.context.desk.note_touches()  # it knows nothing of what is around the handlers of Objects here
        self._unmount(member.client)
        if len(self._numbers) + len(request.tiers) > MAX_TIERS:
            raise MasterRefused(
                f"this master has seen {len(self._numbers)} tiers, and can tell no more apart"
            )
        numbers = []
        for name, shared in request.tiers:
            number = self._numbers.setdefault(name, len(self._numbers) + 1)
            tier = self._tiers.setdefault(number, _Tier(shared))
            tier.owners[member.client] = request.address
            if not shared:
                tier.round = (tier.round + 1) & MAX_ROUND
            numbers.append(number)
        unnamed = deque((number, 0) for number in numbers if not self._tiers[number].shared)
        self._owners[member.client] = _Owner(numbers, request.touches, unnamed)
        self._note_open()
        if member.segment:
            self._segments[member.segment] = member.client
        return tiers.TiersMounted(tiers=numbers)

    def _note_open(self) -> None:
        self._open = [number for number, tier in sorted(self._tiers.items()) if tier.owners]

    def _unmount(self, client: int) -> None:
        if self._owners.pop(client, None) is None:
            return
        self._segments = {segment: owner for segment, owner in self._segments.items() if owner != client}
        for tier in self._tiers.values():
            tier.owners.pop(client, None)
        self._note_open()
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
            epoch, version, nbytes = numbers
            where = (request.tier, epoch, version, nbytes)
            # What this master has seen this tier with is known exactly. Of one that is new to it, everything
            # is taken that says nothing else than memory and other tiers do.
            good = self._records.name(digest, where, tier.round)
            if not good and tier.adopting and not there:
                good = self._is_youngest(digest, where)
                if good:
                    self._records.enter(digest, where, tenant, tier.round)
            taken.append(good)
        return tiers.RecordsTaken(taken=bytes(taken))

    def _is_youngest(self, digest: bytes, where: Where) -> bool:
        """Whether no tier has a younger version of the key; those that have an older one lose it."""
        known = self._records.find(digest)
        if any(other[1:3] > where[1:3] or other[:3] == where[:3] for other in known):
            return False
        for other in known:
            if other[1:3] < where[1:3]:
                self._records.lose(digest, *other[:3])
                self._note_drop(digest, other)
        return True

    def _purge(self, unnamed: deque[tuple[int, int]]) -> None:
        """What an owner did not name has left while nobody looked. Others wait for this: a part at a time."""
        number, first = unnamed.popleft()
        gone, following = self._records.purge(number, self._tiers[number].round, first, PURGED_AT_ONCE)
        if gone:
            log.info("tier %d has lost %d records while it was away", number, gone)
        if following is not None:
            unnamed.appendleft((number, following))

    def _take_offloads(self, request: tiers.TakeOffloads, member: Member, now_s: float) -> Reply:
        owner = self._owners.get(member.client)
        if owner is None:
            return tiers.Offloads(mounted=False, digests=b"", keys=[], versions=b"", drop=[])
        self._admit_touched(now_s)
        # Who asks this has named everything.
        if owner.unnamed:
            self._purge(owner.unnamed)
        drop = []
        for number in owner.tiers:
            tier = self._tiers[number]
            tier.adopting = False
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
            elif ticket is not None:
                del self._tickets[digest]
        packed = np.array(versions, dtype="<u8").tobytes()
        return tiers.Offloads(mounted=True, digests=b"".join(digests), keys=keys, versions=packed, drop=drop)

    def _offloaded(self, request: tiers.Offloaded, member: Member, now_s: float) -> Reply:
        taken = bytearray()
        for digest, numbers in zip(_split(request.digests), _rows(request.numbers, 3), strict=True):
            epoch, version, nbytes = numbers
            # The ticket is gone when the value was replaced or removed since it was given out.
            good = self._has_open(member, request.tier) and epoch == self.context.epoch
            good = good and self._tickets.get(digest) == (version, member.client)
            where, round = (request.tier, epoch, version, nbytes), self._round(request.tier)
            if good and not self._records.name(digest, where, round):  # who got no answer asks again
                self._records.enter(digest, where, self._keys.get(digest, (b"", None))[1], round)
            taken.append(good)
        for digest in _split(request.done):
            self._tickets.pop(digest, None)
        return tiers.RecordsTaken(taken=bytes(taken))

    def _round(self, tier: int) -> int:
        return self._tiers[tier].round if tier in self._tiers else 0

    def _has_open(self, member: Member, tier: int) -> bool:
        return tier in self._tiers and member.client in self._tiers[tier].owners

    def _lost(self, request: tiers.RecordsLost, member: Member, now_s: float) -> Reply:
        if not self._has_open(member, request.tier):
            return protocol.Done()
        for digest, numbers in zip(_split(request.digests), _rows(request.numbers, 3), strict=True):
            self._records.lose(digest, request.tier, *numbers[:2])
        return protocol.Done()

    # ---- what goes around the handlers of Objects

    def _locate(self, inner: Handler, request: protocol.Locate, member: Member, now_s: float) -> Reply:
        reply = inner(request, member, now_s)
        if not self._tiers or not isinstance(reply, protocol.Located):
            return reply
        digests = _split(request.digests)
        if b"\0" in reply.found and len(self._records):
            reply.tiered = self._tiered(request.digests, reply.found)
        for position, inside, segment, *_ in _rows(reply.placement.rows, 5):
            if not inside:
                self._admit(digests[position], segment, 2, now_s)
        return reply

    def _tiered(self, digests: bytes, found: bytes) -> tiers.Tiered | None:
        rows = self._records.rows(digests, found, self._open)
        if not rows:
            return None
        named = {row[1] for row in _rows(rows, 5)}
        owners = {number: list(self._tiers[number].owners.items()) for number in named}
        return tiers.Tiered(rows=rows, owners=owners)

    def _admit(self, digest: bytes, segment: int, touches: int, now_s: float) -> None:
        """A value was touched so often: the owner of its first byte may write it to its tiers."""
        client = self._segments.get(segment, 0)
        owner = self._owners.get(client)
        if owner is None or owner.touches > touches or len(owner.queue) >= MAX_QUEUED:
            return
        # Without its key nothing can be written.
        if digest in self._keys and digest not in self._tickets and digest not in self._records:
            # Rising, as versions are, and not to be guessed: who names one may have the record read.
            self._last_ticket += 1
            self._tickets[digest] = (self._last_ticket << 32 | secrets.randbits(32), client)
            owner.queue.append(digest)

    def _reserve(self, inner: Handler, request: protocol.Reserve, member: Member, now_s: float) -> Reply:
        if not self._tiers:
            return inner(request, member, now_s)
        if request.promoted:
            return self._promote(inner, request, member, now_s)
        only_in_tiers: list[int] = []
        if request.if_exists != "replace" and len(self._records):
            in_memory = self._in_memory(request.digests, member, now_s)
            in_tiers = self._records.reachable(request.digests, self._open)
            only_in_tiers = [i for i, there in enumerate(in_memory) if not there and in_tiers[i]]
        reply = _without(inner, request, only_in_tiers, member, now_s)
        self._note(reply, request, [])
        return reply

    def _promote(
        self,
        inner: Handler,
        request: protocol.Reserve,
        member: Member,
        now_s: float,
    ) -> Reply:
        stats = self.context.stats()
        sizes = int(np.frombuffer(request.sizes, dtype="<u8").sum())
        if stats.free_bytes - sizes < FREE_TO_PROMOTE * stats.capacity_bytes:
            return _nothing_placed(len(request.keys), Outcome.FULL)
        reply = inner(request, member, now_s)
        self._note(reply, request, [(row[0], row[1]) for row in _rows(request.promoted, 2)])
        return reply

    def _note(self, reply: Reply, request: protocol.Reserve, promoted: list[tuple[int, int]]) -> None:
        if not isinstance(reply, protocol.Reserved) or not reply.reservation:
            return
        digests = _split(request.digests)
        placed = [i for i, outcome in enumerate(reply.outcomes) if outcome == Outcome.PLACED]
        first = {row[0]: row[2] for row in _rows(reply.placement.rows, 5) if not row[1]}
        self._placed[reply.reservation] = Placed(
            [digests[i] for i in placed],
            [request.keys[i] for i in placed],
            [first.get(i, 0) for i in placed],
            [promoted[i] for i in placed] if promoted else [],
        )

    def _commit(self, inner: Handler, request: protocol.Commit, member: Member, now_s: float) -> Reply:
        # Of who asks: ids of reservations can be guessed.
        mine = self.context.reservations.slots_of(request.reservation, member.client)
        placed = self._placed.pop(request.reservation, None) if mine else None
        if placed is not None and placed.promoted:
            # What was replaced or removed since it was read from the tier must not come back.
            stale = [
                i
                for i, (digest, version) in enumerate(zip(placed.digests, placed.promoted, strict=True))
                if all(where[1:3] != version for where in self._records.find(digest))
            ]
            request.failed = sorted({*request.failed, *stale})
            return inner(request, member, now_s)
        # From the reservation itself: it may be older than the first tier.
        digests = self._reserved(request.reservation, member) if self._tiers else []
        reply = inner(request, member, now_s)
        if isinstance(reply, protocol.Committed):
            stored = [outcome == Outcome.STORED for outcome in reply.outcomes]
            for digest, done in zip(digests, stored, strict=False):
                if done:
                    self._forget(digest)
            if placed is not None:
                self._plan(placed, stored, member, now_s)
        return reply

    def _reserved(self, reservation: int, member: Member) -> list[bytes]:
        slots = self.context.reservations.slots_of(reservation, member.client)
        return _split(self.context.map.digests_of(slots))

    def _plan(self, placed: Placed, stored: list[bool], member: Member, now_s: float) -> None:
        """Values that were stored are new to all tiers."""
        told = zip(placed.digests, placed.keys, placed.segments, stored, strict=False)
        for digest, key, segment, done in told:
            if done:
                self._remember(digest, (key, member.tenant_name))
                self._admit(digest, segment, 1, now_s)

    def _remember(self, digest: bytes, key: tuple[bytes, str]) -> None:
        self._keys[digest] = key
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def _around_exist(self, inner: Handler) -> Handler:
        self._exist = inner

        def exist(request: protocol.Exist, member: Member, now_s: float) -> Reply:
            return self._found_too(inner(request, member, now_s), request.digests)

        return exist

    def _remove(self, inner: Handler, request: protocol.Remove, member: Member, now_s: float) -> Reply:
        reply = self._found_too(inner(request, member, now_s), request.digests)
        for digest in _split(request.digests):
            self._forget(digest)
        return reply

    def _remove_all(self, inner: Handler, request: protocol.RemoveAll, member: Member, now_s: float) -> Reply:
        for digest in _split(self._records.of_tenant(member.tenant_name)):
            self._forget(digest)
        self._tickets.clear()  # what is being written meanwhile is out of date, whosever it is
        return inner(request, member, now_s)

    def _found_too(self, reply: Reply, digests: bytes) -> Reply:
        if len(self._records) and isinstance(reply, protocol.Found):
            in_tiers = self._records.reachable(digests, self._open)
            reply.found = bytes(there or tiered for there, tiered in zip(reply.found, in_tiers, strict=True))
        return reply

    def _in_memory(self, digests: bytes, member: Member, now_s: float) -> bytes:
        assert self._exist is not None
        reply = self._exist(protocol.Exist(digests=digests), member, now_s)
        assert isinstance(reply, protocol.Found)
        return reply.found

    def tiers(self) -> list[TierReport]:
        """See Group."""
        names = {number: name for name, number in self._numbers.items()}
        found = []
        for number, tier in self._tiers.items():
            records, value_bytes = self._records.count(number)
            owners = list(tier.owners.values())
            found.append(
                TierReport(tier=names[number], owners=owners, records=records, value_bytes=value_bytes)
            )
        return found

    def own(self, digests: bytes, tenant: str) -> bytes:
        """See Group."""
        return self._records.own(digests, tenant) if len(self._records) else digests

    def _forget(self, digest: bytes) -> None:
        """What tiers have of this key is out of date."""
        self._tickets.pop(digest, None)
        self._keys.pop(digest, None)
        for where in self._records.forget(digest):
            self._note_drop(digest, where)

    def _note_drop(self, digest: bytes, where: Where) -> None:
        """Who has that tier open is to remove the record. Who mounts it later does not find it known."""
        tier = self._tiers[where[0]]
        if tier.owners:
            tier.drops.append((digest, where[1], where[2]))


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
