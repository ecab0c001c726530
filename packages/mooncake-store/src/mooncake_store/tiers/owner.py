"""The tiers of one member of the store: what is written to them, and what is read from them for others."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from mooncake_store import protocol
from mooncake_store._errors import StoreClosed, StoreError, TierUnavailable
from mooncake_store.batch import Digests
from mooncake_store.config import StoreConfig
from mooncake_store.keys import DIGEST_BYTES
from mooncake_store.local_memory import Registered
from mooncake_store.membership import Membership
from mooncake_store.mover import Layout, Mover
from mooncake_store.protocol import Outcome, tiers
from mooncake_store.reader import Reading
from mooncake_store.tiers.codec import rounded
from mooncake_store.tiers.config import open_tier
from mooncake_store.tiers.contract import Record, RecordMeta, Stored, Tier, WriteOutcome
from mooncake_store.tiers.losses import Losses
from mooncake_store.tiers.staging import Lease, Staging
from mooncake_store.time_budget import TimeBudget
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import TransferError

__all__ = ["TierOwner", "open_tiers"]

OFFLOADS_AT_ONCE = 256
OFFLOAD_BYTES = 32 << 20
ADOPTED_AT_ONCE = 4096
ADOPT_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 10.0
MAX_LOST, MAX_PROMOTIONS = 1_000_000, 1024

log = logging.getLogger(__name__)


class _Promotion(NamedTuple):
    lease: Lease
    records: list[tuple[int, Stored]]  # place in the lease


class TierOwner:
    """Runs the tiers of a store. One thread writes what the master names, in batches, and brings back into
    memory what is read from tiers; puts and gets never wait for it.
    """

    def __init__(
        self,
        engine: TransferEngine,
        membership: Membership,
        mover: Mover,
        config: StoreConfig,
        opened: Sequence[Tier],
    ) -> None:
        """Raises MemoryUnavailable of the engine."""
        self._engine = engine
        self._membership = membership
        self._mover = mover
        self._config = config
        self._tiers = list(opened)
        self._numbers: dict[int, Tier] = {}
        self._mounted = False
        self._losses = Losses(MAX_LOST)
        self._news = False  # something was lost since the last turn
        self._promotions: deque[_Promotion] = deque()
        self.entered = 0  # records of which the master has been told
        self._stop = False
        self._wake = threading.Condition()
        self.staging = Staging(engine, config.tier_staging_bytes, config.lease_ttl_s)
        self._region: Region | None = None
        self._given_up: list[
            Region
        ] = []  # memory that a driver may still write to, until the engine is closed
        for tier in self._tiers:
            tier.on_gone = lambda gone, tier=tier: self._note_lost(tier, gone)
            tier.lend_memory(self.staging.memory)
        self._offload_region()
        self._thread = threading.Thread(target=self._run, name="mooncake-store-tiers", daemon=True)

    @property
    def opened(self) -> list[Tier]:
        """The tiers."""
        return list(self._tiers)

    def start(self) -> None:
        """Tell the master what is in the tiers, then go on in the background. Raises MasterUnreachable."""
        # The engine keeps the handler for good; it must not keep the tiers with it.
        serve = weakref.WeakMethod(self._serve)
        self._engine.serve(
            tiers.stage_method(self._membership.client), lambda payload, caller: _serve(serve, payload)
        )
        self._mount()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the tiers."""
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        for tier in self._tiers:
            tier.close()
        self.staging.close()
        if self._region is not None:
            self._region.close()

    def _offload_region(self) -> Region:
        """Through which values go to tiers. Raises MemoryUnavailable."""
        if self._region is None:
            self._region = self._engine.allocate(OFFLOAD_BYTES, name="store-tier-offload")
            for tier in self._tiers:
                tier.lend_memory(np.frombuffer(self._region.view(), dtype=np.uint8))
        return self._region

    # ---- for readers

    def _serve(self, payload: bytes) -> bytes:
        request = tiers.decode_stage(payload)
        if isinstance(request, tiers.Unstage):
            return protocol.encode(tiers.Unstaged(held=self.staging.end(request.lease)))
        assert isinstance(request, tiers.Stage)
        lease = self.stage(request)
        return protocol.encode(
            tiers.Staged(lease=lease.id, descriptor=lease.descriptor, offsets=lease.offsets)
        )

    def stage(self, request: tiers.Stage) -> Lease:
        """Bring records into memory. Raises TierUnavailable for a number of an earlier master."""
        rows = np.frombuffer(request.numbers, dtype="<u8").reshape(-1, 3).tolist()
        digests = _split(request.digests)
        tier = self._numbers.get(request.tier)
        if tier is None:
            raise TierUnavailable(
                f"no tier here has number {request.tier} (any more): the master was followed by another; a "
                "retry is safe"
            )
        reads = [(digest, *row) for digest, row in zip(digests, rows, strict=True)]
        lease = self.staging.stage(tier, reads, self._config.call_timeout_s / 2)
        if lease.missing:
            self._note_missing(tier, [reads[at] for at in lease.missing])
        self._plan_promotion(tier, lease, digests)
        return lease

    def _note_missing(self, tier: Tier, reads: list[tuple[bytes, int, int, int]]) -> None:
        """The master named these, and the tier does not have them: removed by another process or a rule of
        the bucket, or put aside as damaged.
        """
        found = tier.find([digest for digest, *_ in reads], self._config.call_timeout_s / 4)
        gone = [
            (digest, (epoch, version))
            for (digest, epoch, version, _), stored in zip(reads, found, strict=True)
            # Who asked for another size than it has is told nothing, and changes nothing.
            if stored is None or (stored.meta.epoch, stored.meta.version) != (epoch, version)
        ]
        if gone:
            self._note_lost(tier, gone)

    def _plan_promotion(self, tier: Tier, lease: Lease, digests: list[bytes]) -> None:
        good = [(at, digests[at]) for at, offset in enumerate(lease.offsets) if offset >= 0]
        if not good or len(self._promotions) >= MAX_PROMOTIONS:
            return
        found = tier.find([digest for _, digest in good], self._config.call_timeout_s / 4)
        # Those of other tenants would come back as this one's.
        records = [
            (at, stored)
            for (at, _), stored in zip(good, found, strict=True)
            if stored is not None and stored.meta.tenant == self._config.tenant
        ]
        if not records:
            return
        self.staging.hold(lease)
        with self._wake:
            self._promotions.append(_Promotion(lease, records))
            self._wake.notify_all()

    # ---- the thread

    def _run(self) -> None:
        while not self._stop:
            try:
                busy = self._turn()
            except (StoreError, TransferError) as error:
                log.debug("the tiers wait for the master: %s", error)
                busy = False
            except Exception:  # a tier of another package, a disk: whatever it is, others go on being served
                log.exception("the tiers of this store go on after an error")
                busy = False
            with self._wake:
                if not busy:
                    self._wake.wait_for(
                        lambda: self._stop or self._news or bool(self._promotions),
                        self._config.heartbeat_s / 2,
                    )
        while self._promotions:
            self.staging.release(self._promotions.popleft().lease)

    def _turn(self) -> bool:
        """Whether there is more to do at once."""
        while self._promotions:
            promotion = self._promotions.popleft()
            try:
                self._promote(promotion)
            finally:
                self.staging.release(promotion.lease)
        if self._losses.take_overflow():
            self._mounted = False
        if not self._mounted:
            self._mount()
        self._tell_lost()
        request = tiers.TakeOffloads(most=OFFLOADS_AT_ONCE)
        found = self._membership.ask(request, tiers.Offloads)
        self._mounted = found.mounted
        for number, digest, epoch, version in found.drop:
            self._numbers[number].drop([(digest, (epoch, version))], self._config.call_timeout_s)
        digests = _split(found.digests)
        versions = np.frombuffer(found.versions, dtype="<u8").tolist()
        todo = [
            (digest, key, RecordMeta(epoch=request.epoch, version=version, tenant=tenant))
            for digest, (key, tenant), version in zip(digests, found.keys, versions, strict=True)
        ]
        while todo and not self._stop:
            todo = self._offload(todo)
        return len(digests) == OFFLOADS_AT_ONCE or not self._mounted

    def _mount(self) -> None:
        request = tiers.MountTiers(
            address=self._engine.address,
            tiers=[(tier.id, tier.shared) for tier in self._tiers],
            touches=1 if self._config.tier_admission == "all" else 2,
        )
        mounted = self._membership.ask(request, tiers.TiersMounted)
        self._numbers = dict(zip(mounted.tiers, self._tiers, strict=True))
        for number, tier in self._numbers.items():
            page: list[Stored] = []
            for stored in tier.adopt(ADOPT_TIMEOUT_S):
                page.append(stored)
                if len(page) == ADOPTED_AT_ONCE:
                    self._adopt(number, tier, page)
                    page = []
            if page:
                self._adopt(number, tier, page)
        self._mounted = True

    def _adopt(self, number: int, tier: Tier, page: list[Stored]) -> None:
        digests = [stored.digest for stored in page]
        numbers = [(stored.meta.epoch, stored.meta.version, stored.nbytes) for stored in page]
        request = tiers.AdoptRecords(
            tier=number,
            digests=b"".join(digests),
            numbers=_packed(numbers),
            tenants=[stored.meta.tenant for stored in page],
        )
        taken = self._membership.ask(request, tiers.RecordsTaken).taken
        if not tier.shared:  # what is shared may be another cluster's
            self._drop(tier, digests, numbers, taken)

    def _drop(
        self, tier: Tier, digests: list[bytes], numbers: list[tuple[int, int, int]], taken: bytes
    ) -> None:
        refused = [
            (digest, row[:2]) for digest, row, good in zip(digests, numbers, taken, strict=True) if not good
        ]
        if refused:
            tier.drop(refused, self._config.call_timeout_s)

    def _offload(self, todo: list[tuple[bytes, bytes, RecordMeta]]) -> list[tuple[bytes, bytes, RecordMeta]]:
        """Write the first of these, as many as go at once; the others."""
        batch = Digests(b"".join(digest for digest, *_ in todo))
        with Reading(self._membership, self._mover, batch, self._config.transfer_timeout_s) as reading:
            sizes = reading.sizes.tolist()
            region, at = self._offload_region(), 0
            chosen: list[tuple[int, int, int]] = []
            for position, nbytes in enumerate(sizes):
                if chosen and at + nbytes > OFFLOAD_BYTES:
                    break
                chosen.append((position, at, nbytes))
                at += rounded(nbytes)
            if at > region.nbytes:
                region = self._engine.allocate(at, name="store-tier-offload-large")
            parts = [(i, 0, start, n) for i, start, n in chosen if reading.found[i] and n]
            memory = Registered(region)
            if parts:
                reading.fetch_parts(memory, np.array(parts, dtype=np.uint64))
        # What memory has damaged must not become good by the checksum that a tier gives it.
        sound = [
            (todo[i], start, n)
            for i, start, n in chosen
            if reading.good[i] and reading.is_as_put(memory, i, start, n)
        ]
        try:
            self._write(sound, region, todo, chosen)
        finally:
            self._let_go(memory)
        return todo[len(chosen) :]

    def _let_go(self, memory: Registered) -> None:
        """Of what values went through; what a driver still uses is replaced."""
        region = memory.region()
        if memory.in_use:
            self._given_up.append(region)
            self._region = None if region is self._region else self._region
        elif region is not self._region:
            region.close()

    def _write(
        self,
        values: list[tuple[tuple[bytes, bytes, RecordMeta], int, int]],
        region: Region,
        todo: list[tuple[bytes, bytes, RecordMeta]],
        chosen: list[tuple[int, int, int]],
    ) -> None:
        memory = np.frombuffer(region.view(), dtype=np.uint8)
        records = [
            Record(digest, key, memory[start : start + nbytes], meta)
            for (digest, key, meta), start, nbytes in values
        ]
        done = b"".join(todo[i][0] for i, *_ in chosen)
        last = max(self._numbers)
        for number, tier in self._numbers.items():
            written = self._written(tier, records)
            numbers = [(one.meta.epoch, one.meta.version, one.value.nbytes) for one in written]
            digests = [one.digest for one in written]
            request = tiers.Offloaded(
                tier=number,
                digests=b"".join(digests),
                numbers=_packed(numbers),
                done=done if number == last else b"",
            )
            taken = self._membership.ask(request, tiers.RecordsTaken).taken
            self.entered += sum(taken)
            self._drop(tier, digests, numbers, taken)

    def _written(self, tier: Tier, records: list[Record]) -> list[Record]:
        """Write them; those that are there now."""
        outcomes = tier.write(records, self._config.tier_write_timeout_s)
        written = _with(WriteOutcome.STORED, records, outcomes)
        superseded = _with(WriteOutcome.SUPERSEDED, records, outcomes)
        if superseded and not tier.shared:
            # By what the master does not know: of a master whose epochs were higher, so that it only looks
            # younger.
            tier.drop([(record.digest, None) for record in superseded], self._config.call_timeout_s)
            again = tier.write(superseded, self._config.tier_write_timeout_s)
            written += _with(WriteOutcome.STORED, superseded, again)
        return written

    def _promote(self, promotion: _Promotion) -> None:
        """Put what was read from a tier back into memory, where there is room that nobody needs."""
        lease, records = promotion
        request = protocol.Reserve(
            digests=b"".join(stored.digest for _, stored in records),
            keys=[stored.key for _, stored in records],
            sizes=np.array([stored.nbytes for _, stored in records], dtype="<u8").tobytes(),
            if_exists="keep",
            avoid=[],
            promoted=np.array(
                [(stored.meta.epoch, stored.meta.version) for _, stored in records], dtype="<u8"
            ).tobytes(),
        )
        asked_s = time.monotonic()
        reserved = self._membership.ask(request, protocol.Reserved)
        if not reserved.reservation:
            return
        offsets = np.array([lease.offsets[at] for at, _ in records], dtype=np.uint64)
        placed = [i for i, outcome in enumerate(reserved.outcomes) if outcome == Outcome.PLACED]
        layout = Layout(reserved.placement, offsets, request.epoch)
        until_s = asked_s + 0.9 * self._membership.reservation_ttl_s
        enough_s = TimeBudget(self._config.transfer_timeout_s).begin(layout.nbytes, tries=1)
        memory = Registered(lease.region)
        moved = self._mover.write(memory, layout, min(until_s, enough_s), compare=True)
        if memory.in_use:
            self.staging.give_up(lease)
        failed = [number for number, at in enumerate(placed) if at in moved.failed]
        commit = protocol.Commit(
            reservation=reserved.reservation, failed=failed, if_exists="keep", notices_seen=0
        )
        self._membership.conclude(commit, request.epoch, protocol.Committed)

    def _note_lost(self, tier: Tier, gone: list[tuple[bytes, tuple[int, int]]]) -> None:
        self._losses.note(tier, gone)
        with self._wake:
            self._news = True
            self._wake.notify_all()

    def _tell_lost(self) -> None:
        self._news = False
        numbers = {id(tier): number for number, tier in self._numbers.items()}
        untold = self._losses.take()
        try:
            while untold:
                tier, gone = untold[-1]
                request = tiers.RecordsLost(
                    tier=numbers[id(tier)],
                    digests=b"".join(digest for digest, _ in gone),
                    numbers=_packed([(*version, 0) for _, version in gone]),
                )
                self._membership.ask(request, protocol.Done)
                untold.pop()
        finally:
            for tier, gone in untold:
                self._losses.note(tier, gone)


def open_tiers(
    engine: TransferEngine,
    membership: Membership,
    mover: Mover,
    config: StoreConfig,
    given: Sequence[Tier],
) -> TierOwner | None:
    """Open the tiers of the configuration besides those given; None when there are none. Closes all of them
    when one cannot be opened.
    """
    with ExitStack() as stack:
        opened = list(given)
        for tier in opened:
            stack.callback(tier.close)
        for described in config.tiers:
            opened.append(open_tier(described))
            stack.callback(opened[-1].close)
        if not opened:
            return None
        owner = TierOwner(engine, membership, mover, config, opened)
        assert mover.tiers is not None
        mover.tiers.own = owner
        stack.pop_all()
        return owner


def _serve(method: Callable[[], Callable[[bytes], bytes] | None], payload: bytes) -> bytes:
    serve = method()
    if serve is None:
        raise StoreClosed("the store whose tiers these were has been closed")
    return serve(payload)


def _with(wanted: WriteOutcome, records: list[Record], outcomes: list[WriteOutcome]) -> list[Record]:
    return [record for record, outcome in zip(records, outcomes, strict=True) if outcome is wanted]


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def _packed(rows: Sequence[tuple[int, ...]]) -> bytes:
    return np.array(rows, dtype="<u8").tobytes()
