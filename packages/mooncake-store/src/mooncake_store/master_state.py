"""What a master decides, without clock, threads or network: requests and times go in, replies come out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake_store import protocol
from mooncake_store.allocator import BestFit
from mooncake_store.catalog import StoredObject
from mooncake_store.config import StoreConfig
from mooncake_store.inventory import Inventory
from mooncake_store.keys import DIGEST_BYTES
from mooncake_store.lease import Grant, GrantTable
from mooncake_store.members import Member, Members
from mooncake_store.placement import Segment, Use
from mooncake_store.protocol import Outcome, Reply, Request, StoreStats

__all__ = ["MasterState"]

log = logging.getLogger(__name__)


class MasterState:
    """The whole state of one master, from its start to its end. Not thread-safe.

    Every request names the master's epoch, so that nothing meant for an earlier master has an effect here.
    Times are seconds of one clock that never goes back.
    """

    def __init__(self, epoch: int, config: StoreConfig) -> None:
        self.epoch = epoch
        self.config = config
        self._inventory = Inventory(config.evict_reserve_fraction)
        self._members = Members()
        self._leases = GrantTable(config.lease_ttl_s)
        self._reservations = GrantTable(config.reservation_ttl_s)
        # Given up by writers that may still write for a while: free only after the reservation's deadline.
        self._exposed: list[tuple[float, StoredObject]] = []
        self._last_segment = 0
        self._hits = self._misses = 0
        self._handlers: dict[type[Any], Callable[[Any, Member, float], Reply]] = {
            protocol.Unmount: self._unmount,
            protocol.Reserve: self._reserve,
            protocol.Commit: self._commit,
            protocol.Locate: self._locate,
            protocol.Release: self._release,
            protocol.Exist: self._exist,
            protocol.Remove: self._remove,
            protocol.Heartbeat: self._heartbeat,
            protocol.GetStats: self._get_stats,
        }

    def handle(self, request: Request, connection: int, address: str, now_s: float) -> Reply:
        """Answer one request that came over a connection (0: from this process) of the engine at
        ``address``.
        """
        if isinstance(request, protocol.Mount):
            reply: Reply = self._mount(request, connection, address, now_s)
        else:
            reply = self._handle_member(request, connection, now_s)
        self._send_notices()
        return reply

    def on_connection_lost(self, connection: int) -> None:
        """A client's connection has ended: its segment, leases and reservations are void."""
        for member in self._members.on_connection(connection):
            self._drop(member, "its connection ended")
        self._send_notices()

    def on_tick(self, now_s: float) -> None:
        """Let end what has passed its deadline. To be called about every second, or when
        :meth:`next_deadline_s`.
        """
        for lease in self._leases.take_expired(now_s):
            self._end_lease(lease)
        for reservation in self._reservations.take_expired(now_s):
            for entry in reservation.objects:
                self._inventory.abandon(entry)
        over = [entry for deadline_s, entry in self._exposed if deadline_s <= now_s]
        if over:
            self._exposed = [(deadline_s, entry) for deadline_s, entry in self._exposed if deadline_s > now_s]
        for entry in over:
            self._inventory.abandon(entry)
        silent_since_s = now_s - self.config.client_ttl_s
        for member in self._members.hopeless(silent_since_s, self.config.max_unread_notices):
            silent_s, unread = now_s - member.heard_s, len(member.unread)
            self._drop(member, f"it was silent for {silent_s:.1f} s and has {unread} notices unread")
        self._send_notices()

    def next_deadline_s(self) -> float | None:
        """When the next lease or reservation expires unless renewed."""
        deadlines = [self._leases.first_deadline_s, self._reservations.first_deadline_s]
        deadlines += [deadline_s for deadline_s, _ in self._exposed]
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def take_to_ring(self) -> list[Member]:
        """Members to be told that notices wait for them, each once."""
        return self._members.take_to_ring()

    def stats(self) -> StoreStats:
        """The store's numbers."""
        capacity, free, _, leased, reserved = self._inventory.room()
        counts = self._inventory.counts
        return StoreStats(
            objects=len(self._inventory.catalog),
            capacity_bytes=capacity,
            used_bytes=capacity - free - reserved,
            free_bytes=free,
            leased_bytes=leased,
            reserved_bytes=reserved,
            leases=len(self._leases),
            reservations=len(self._reservations),
            segments=len(self._inventory.pool.segments),
            clients=len(self._members),
            hits=self._hits,
            misses=self._misses,
            stored=counts.stored,
            evicted=counts.evicted,
            removed=counts.removed,
            lost=counts.lost,
        )

    # Members come and go.

    def _mount(self, request: protocol.Mount, connection: int, address: str, now_s: float) -> Reply:
        before = self._members.get(request.client)
        if before is not None:
            self._drop(before, "it joined again")
        member = Member(request.client, connection, address, now_s)
        self._members.add(member)
        if request.nbytes:
            self._last_segment += 1
            member.segment = self._last_segment
            free_space = BestFit(request.nbytes, self.config.granule_bytes)
            self._inventory.add_segment(
                Segment(member.segment, member.client, request.descriptor, free_space)
            )
        log.info(
            "joined client=%016x address=%s lends_bytes=%d", member.client, address or "local", request.nbytes
        )
        return protocol.Mounted(
            epoch=self.epoch,
            segment=member.segment,
            lease_ttl_s=self.config.lease_ttl_s,
            reservation_ttl_s=self.config.reservation_ttl_s,
        )

    def _unmount(self, request: protocol.Unmount, member: Member, now_s: float) -> Reply:
        self._drop(member, "it left")
        return protocol.Done()

    def _drop(self, member: Member, why: str) -> None:
        log.info("dropped client=%016x address=%s why=%r", member.client, member.address or "local", why)
        self._members.remove(member)
        for lease in self._leases.take_all(member.client):
            self._end_lease(lease)
        for reservation in self._reservations.take_all(member.client):
            self._exposed += [(reservation.deadline_s, entry) for entry in reservation.objects]
        if member.segment:
            self._inventory.drop_segment(member.segment)

    def _handle_member(self, request: Any, connection: int, now_s: float) -> Reply:
        if request.epoch != self.epoch:
            return protocol.Stale(epoch=self.epoch, reason="the master has been started anew")
        member = self._members.get(request.client)
        if member is None or member.connection != connection:
            return protocol.Stale(epoch=self.epoch, reason="the master has lost the connection meanwhile")
        member.heard_s = now_s
        return self._handlers[type(request)](request, member, now_s)

    def _heartbeat(self, request: protocol.Heartbeat, member: Member, now_s: float) -> Reply:
        for lease in request.leases:
            self._leases.renew(lease, member.client, now_s)
        notices = self._members.read_notices(member, request.notices_seen)
        return protocol.Alive(notices=notices, segments=list(self._inventory.pool.segments))

    def _send_notices(self) -> None:
        for entry, successor in self._inventory.departures:
            # Whoever has nothing to do with the new version has lost the key.
            for client in self._concerned(entry) - self._concerned(successor):
                self._members.notify(client, entry)
        self._inventory.departures.clear()

    def _concerned(self, entry: StoredObject | None) -> set[int]:
        """Who has the value in their segment, and who put it there."""
        if entry is None:
            return set()
        segments = self._inventory.pool.segments
        return {segments[segment].client for segment in entry.segments() & segments.keys()} | {entry.writer}

    # Values come.

    def _reserve(self, request: protocol.Reserve, member: Member, now_s: float) -> Reply:
        digests = _split(request.digests)
        sizes = np.frombuffer(request.sizes, dtype="<u8").tolist()
        there = [None if request.if_exists == "replace" else self._inventory.catalog.find(d) for d in digests]
        # The blocks of one batch belong together: what is there of them must not make room for the others.
        kept = [entry for entry in there if entry is not None]
        for entry in kept:
            self._inventory.lease(entry)
        self._inventory.touch(reversed(kept))
        entries = [
            self._inventory.reserve(digest, key, size, client=member.client, avoid=request.avoid)
            if entry is None
            else None
            for digest, key, size, entry in zip(digests, request.keys, sizes, there, strict=True)
        ]
        for entry in reversed(kept):
            self._inventory.unlease(entry)
        outcomes = [
            Outcome.EXISTS if found else Outcome.PLACED if made else Outcome.FULL
            for found, made in zip(there, entries, strict=True)
        ]
        placed = [entry for entry in entries if entry is not None]
        full = Outcome.FULL in outcomes
        wait = full and self._waiting_may_help(placed)
        grant = self._reservations.grant(member.client, placed, now_s).id if placed else 0
        return protocol.Reserved(
            reservation=grant,
            outcomes=bytes(outcomes),
            placement=self._placement(entries),
            room=self._inventory.room() if full else None,
            wait=wait,
        )

    def _waiting_may_help(self, own: list[StoredObject]) -> bool:
        # Not for what this batch itself has taken.
        pool = self._inventory.pool
        own_bytes = sum(pool.taken_bytes(entry.extents) for entry in own)
        return pool.used_bytes(Use.LEASED) + pool.used_bytes(Use.RESERVED) > own_bytes

    def _commit(self, request: protocol.Commit, member: Member, now_s: float) -> Reply:
        grant = self._reservations.take(request.reservation, member.client)
        if grant is None:
            notices = self._members.read_notices(member, request.notices_seen)
            return protocol.Committed(outcomes=b"", notices=notices)
        failed = set(request.failed)
        outcomes = [Outcome.FAILED] * len(grant.objects)
        written = [i for i in range(len(grant.objects)) if i not in failed]
        results = self._inventory.commit([grant.objects[i] for i in written], request.if_exists)
        for position, outcome in zip(written, results, strict=True):
            outcomes[position] = outcome
        self._exposed += [(grant.deadline_s, grant.objects[i]) for i in failed]
        self._send_notices()
        notices = self._members.read_notices(member, request.notices_seen)
        return protocol.Committed(outcomes=bytes(outcomes), notices=notices)

    # Values are looked for, read and removed.

    def _locate(self, request: protocol.Locate, member: Member, now_s: float) -> Reply:
        entries = [self._inventory.catalog.find(digest) for digest in _split(request.digests)]
        found = [entry for entry in entries if entry is not None]
        for entry in found:
            self._inventory.lease(entry)
        self._inventory.touch(reversed(found))
        self._hits += len(found)
        self._misses += len(entries) - len(found)
        return protocol.Located(
            lease=self._leases.grant(member.client, found, now_s).id if found else 0,
            found=bytes(entry is not None for entry in entries),
            sizes=np.array([entry.nbytes if entry else 0 for entry in entries], dtype="<u8").tobytes(),
            placement=self._placement(entries),
        )

    def _release(self, request: protocol.Release, member: Member, now_s: float) -> Reply:
        grant = self._leases.take(request.lease, member.client)
        if grant is None:
            return protocol.Released(expired=True, broken=[])
        broken = [position for position, entry in enumerate(grant.objects) if entry.broken]
        self._end_lease(grant)
        return protocol.Released(expired=False, broken=broken)

    def _end_lease(self, grant: Grant) -> None:
        # Tail first, as always: the order in which they come back into the eviction queue.
        for entry in reversed(grant.objects):
            self._inventory.unlease(entry)

    def _exist(self, request: protocol.Exist, member: Member, now_s: float) -> Reply:
        find = self._inventory.catalog.find
        return protocol.Found(found=bytes(find(digest) is not None for digest in _split(request.digests)))

    def _remove(self, request: protocol.Remove, member: Member, now_s: float) -> Reply:
        found = bytearray()
        for digest in _split(request.digests):
            entry = self._inventory.catalog.find(digest)
            found.append(entry is not None)
            if entry is not None:
                self._inventory.remove(entry)
        return protocol.Found(found=bytes(found))

    def _get_stats(self, request: protocol.GetStats, member: Member, now_s: float) -> Reply:
        return self.stats()

    def _placement(self, entries: list[StoredObject | None]) -> protocol.Placement:
        rows: list[int] = []
        for position, entry in enumerate(entries):
            inside = 0
            for segment, offset, nbytes in entry.extents if entry is not None else ():
                rows += (position, inside, segment, offset, nbytes)
                inside += nbytes
        segments = set(rows[2::5])
        return protocol.Placement(
            rows=np.array(rows, dtype="<u8").tobytes(),
            segments={segment: self._inventory.pool.segments[segment].descriptor for segment in segments},
        )


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
