"""The store as a client sees it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mooncake_store import protocol
from mooncake_store._errors import (
    ConfigError,
    KeyExists,
    KeyNotFound,
    LeaseExpired,
    MasterUnreachable,
    SizeMismatch,
    ValueInvalid,
)
from mooncake_store.batch import Batch, as_bools, as_bytes
from mooncake_store.buffers import ValueBuffer, open_buffers
from mooncake_store.cluster.finder import LeaderFinder
from mooncake_store.cluster.finding import is_cluster
from mooncake_store.config import StoreConfig
from mooncake_store.copier import Copier
from mooncake_store.copying import Copying
from mooncake_store.fencer import Fencer
from mooncake_store.keeping import Keeping
from mooncake_store.keys import Key
from mooncake_store.link import Link, LocalLink, open_remote
from mooncake_store.listing import Listing
from mooncake_store.local_memory import Received, Registered, Staged, StagingBuffers
from mooncake_store.master import Master, master_of
from mooncake_store.membership import Membership
from mooncake_store.mover import LocalMemory, Mover
from mooncake_store.notices import Notices
from mooncake_store.observing import Observing
from mooncake_store.own_segment import OwnSegment
from mooncake_store.parts import READ, as_parts, as_ranges, require_inside
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import IfExists, Outcome, notice_method
from mooncake_store.quick import Handed, open_quick
from mooncake_store.read_session import ReadSession
from mooncake_store.reader import Reading, missing, require_good, twice
from mooncake_store.single import Singles, check_if_exists
from mooncake_store.telemetry import ClientCounters
from mooncake_store.tiers.contract import Tier
from mooncake_store.tiers.owner import TierOwner, open_tiers
from mooncake_store.tiers.reading import TierClient
from mooncake_store.value_reader import ValueReader
from mooncake_store.write_session import WriteSession
from mooncake_store.writer import Source, Values, Writer, values_of
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import TransferError

__all__ = ["Store"]

CLOSE_TIMEOUT_S = 5.0
ELECTION_PAUSE_S = 0.1

log = logging.getLogger(__name__)


class Store(Singles, Keeping, Copying, Observing):
    """A client of the distributed store. Thread-safe; a context manager. Close it before its engine.

    Keys are text or bytes, values any bytes, stored as a whole or not at all. A value read is always one
    that was put under exactly this key, whole, or a miss: never a mix, never something else's bytes. Values
    may be evicted at any time when room is needed, and are lost with the process that lends the memory they
    lie in.

    Every call may raise MasterUnreachable (at once while the master is away, else after ``call_timeout_s``;
    the client comes back by itself, see ``StoreConfig.recovery``) and StoreClosed.
    """

    def __init__(
        self,
        engine: TransferEngine,
        master: str | Master | None = None,
        *,
        lend_bytes: int = 0,
        config: StoreConfig | None = None,
        tiers: Sequence[Tier] = (),
    ) -> None:
        """Join a master, or be one.

        Args:
            engine: moves the bytes; must outlive the store.
            master: ``host:port`` of a master's engine; or the URL of a cluster of masters, whose leader is
                found and followed (``etcd://host:port,host:port/NAME``, see ``open_coordination``); or a
                Master of this process; or None: this store brings its own, which others reach at
                ``engine.address``.
            lend_bytes: memory of this process that the store may use.
            config: see StoreConfig.
            tiers: opened ones, besides those of ``config.tiers``; the store closes them.

        Raises MasterUnreachable, MasterRefused, TierError, ConfigError, and MemoryUnavailable of the engine
        when it has no ``lend_bytes``. Nothing is left behind then.
        """
        if lend_bytes < 0:
            raise ConfigError(f"lend_bytes is {lend_bytes}; it must be 0 or more")
        self.config = config or StoreConfig()
        self._engine = engine
        self._closing = threading.Event()
        self._own_master: Master | None = None
        self._finder: LeaderFinder | None = None
        if master is None:
            master = self._own_master = Master(engine, self.config)
        self._segment: OwnSegment | None = None
        self._tiers: TierOwner | None = None
        self._notices = Notices(self.config.tenant)
        self._staging = StagingBuffers(engine, self.config.staging_bytes)
        self._membership: Membership | None = None
        self._copier: Copier | None = None
        self._fencer: Fencer | None = None
        self._counters = ClientCounters()
        if isinstance(master, str) and is_cluster(master):
            self._finder = LeaderFinder(master, self.config.connect_timeout_s)
        try:
            if lend_bytes:
                self._segment = OwnSegment(engine, lend_bytes, self.config.numa_node, self.config.lend_from)
            self._mover = Mover(engine, self._segment, self.config.connect_timeout_s)
            self._member = self._join(master)
            if self._segment is not None:
                self._copier = Copier(self._member, self._mover, self._segment, self._notices, self.config)
                self._member.on_copies = self._copier.wake
                self._fencer = Fencer(self._member, self._segment)
                self._member.on_fence = self._fencer.wake
            self._mover.tiers = TierClient(engine, self._member.client, self.config.call_timeout_s)
            self._tiers = open_tiers(engine, self._member, self._mover, self.config, tiers)
            if self._tiers is not None:
                self._tiers.start()
        except BaseException:
            self.close()
            raise
        self._writer = Writer(self._member, self._mover, self._notices, self.config, self._closing)

    def _join(self, master: str | Master) -> Membership:
        member = self._membership = Membership(
            lambda: self._open_link(master),
            self.config,
            self._segment,
            self._notices,
            self._mover.keep_only,
            self._engine.address,
            self._counters,
            in_cluster=self._finder is not None,
        )
        # Compiled code is seen by no garbage collector: it must not keep who keeps it.
        told = weakref.WeakMethod(member.leases_ended)
        self._quick = open_quick(self._engine, self.config, lambda: _ring(told))
        member.quick = self._mover.quick = self._quick
        if self._quick is not None:
            self._counters.more = self._quick.take_counts
        # The engine keeps the handler for good; it must not keep the store with it.
        ring = weakref.WeakMethod(member.ring)
        self._engine.serve(notice_method(member.client), lambda payload, caller: _ring(ring))
        self._listing = Listing(
            self._engine, member, self._notices, self.config.tenant, self.config.call_timeout_s
        )
        self._start(member)
        return member

    def _start(self, member: Membership) -> None:
        deadline_s = time.monotonic() + self.config.connect_timeout_s
        while True:
            try:
                return member.start()
            except MasterUnreachable:
                # Of a cluster: a leader may be elected any moment.
                if self._finder is None or time.monotonic() >= deadline_s:
                    raise
            time.sleep(ELECTION_PAUSE_S)

    def _open_link(self, master: str | Master) -> Link:
        if self._finder is not None:
            master = self._finder.address()
        if master == self._engine.address:
            master = master_of(self._engine) or master
        if isinstance(master, str):
            return open_remote(self._engine, master, self.config.connect_timeout_s)
        assert self._membership is not None
        return LocalLink(master, self._membership.ring)

    @property
    def segment(self) -> Region | None:
        """The region this store lends, or None. Another one after the master was lost and found."""
        return self._segment.region if self._segment is not None else None

    @property
    def segment_id(self) -> int:
        """What ``PutPolicy(preferred_segments=...)`` calls the segment lent; 0 when none is."""
        return self._segment.id if self._segment is not None else 0

    def _own_segment(self) -> int:
        return self.segment_id

    @property
    def engine(self) -> TransferEngine:
        """The engine that moves the bytes."""
        return self._engine

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that this store has open."""
        return self._tiers.opened if self._tiers is not None else []

    @property
    def master(self) -> Master | None:
        """The master this store brought itself, or None."""
        return self._own_master

    # ---- puts

    def batch_put_from(
        self,
        keys: Sequence[Key],
        region: Region,
        offsets: npt.ArrayLike,
        nbytes: npt.ArrayLike,
        *,
        if_exists: IfExists = "keep",
        policy: PutPolicy | None = None,
    ) -> list[bool]:
        """Store many values of a region, the most important (a prefix's first blocks) first.

        Args:
            offsets: where they lie in the region, one integer per key; a numpy array is the fast form.
            nbytes: their sizes, one per key or one for all.

        Returns: per key, True when it was stored now; False when it was there already, when there was no
        room that could be made, or when its bytes could not be moved. Raises KeyExists with
        ``if_exists="error"`` when a key was there (the other values are stored), KeyInvalid, ValueInvalid.
        """
        check_if_exists(if_exists)
        batch = Batch(self.config.tenant, keys)
        starts, sizes = as_ranges(offsets, nbytes, len(batch), region.nbytes)
        return self._put_many(Values(batch, sizes, [Source(Registered(region), starts)], policy), if_exists)

    def batch_put_parts(
        self,
        keys: Sequence[Key],
        memories: Region | Sequence[object],
        parts: npt.ArrayLike,
        *,
        if_exists: IfExists = "keep",
        policy: PutPolicy | None = None,
    ) -> list[bool]:
        """Store values that lie in several places. As :meth:`batch_put_from`.

        Args:
            memories: a region, or several regions and other contiguous buffers; only from regions do bytes
                go to other processes without a copy in between.
            parts: N x 3 integers: which key (its number in ``keys``), offset in the region, bytes; with
                several memories N x 4, the number of the memory after that of the key. A value is its parts
                in the order given; a key without parts has an empty value.
        """
        check_if_exists(if_exists)
        batch = Batch(self.config.tenant, keys)
        with ExitStack() as stack:
            opened, bounds = self._open(stack, memories, holds_data=True)
            return self._put_many(values_of(batch, opened, parts, bounds, policy), if_exists)

    def _put_many(self, values: Values, if_exists: IfExists) -> list[bool]:
        batch = values.batch
        result = self._writer.put(values, if_exists)
        if if_exists == "error" and Outcome.EXISTS in result.outcomes:
            taken = [batch.keys[i] for i, outcome in enumerate(result.outcomes) if outcome == Outcome.EXISTS]
            raise KeyExists(f"{len(taken)} of {len(batch)} keys exist, the first is {taken[0]!r:.80}")
        not_moved = result.outcomes.count(Outcome.FAILED) + result.outcomes.count(Outcome.LOST)
        if not_moved:
            log.warning("%d of %d values were not stored: %s", not_moved, len(batch), result.reason)
        stored: list[bool] = (np.frombuffer(result.outcomes, dtype=np.uint8) == Outcome.STORED).tolist()
        return stored

    def put_parts(
        self,
        key: Key,
        memories: Sequence[object],
        parts: npt.ArrayLike | None = None,
        *,
        if_exists: IfExists = "error",
        policy: PutPolicy | None = None,
    ) -> None:
        """Store one value that lies in several places. Otherwise as :meth:`put`.

        Args:
            memories: regions of the engine, and other contiguous buffers.
            parts: N x 3 integers: which memory (its number), offset in it, bytes; the value is its parts in
                the order given. None: all of every memory.
        """
        batch = Batch(self.config.tenant, [key])
        with ExitStack() as stack:
            opened, bounds = self._open(stack, memories, holds_data=True)
            if parts is None:
                parts = [(i, 0, memory.array.nbytes) for i, memory in enumerate(opened)]
            rows = np.insert(np.asarray(parts).reshape(-1, 3), 0, 0, axis=1)
            self._put_one(key, values_of(batch, opened, rows, bounds, policy), if_exists)

    def write_session(
        self,
        keys: Sequence[Key],
        nbytes: npt.ArrayLike,
        *,
        if_exists: IfExists = "keep",
        policy: PutPolicy | None = None,
    ) -> WriteSession:
        """Write values of these sizes piece by piece, ``with store.write_session(keys, sizes) as session``,
        into one reservation: ``session.write_parts``. At the end those are stored of which every byte was
        written; after an exception none. Raises KeyInvalid, ValueInvalid.
        """
        check_if_exists(if_exists)
        batch = Batch(self.config.tenant, keys)
        return WriteSession(self._writer, self._open_given, batch, nbytes, if_exists, policy)

    # ---- gets

    def batch_get_into(
        self, keys: Sequence[Key], region: Region, offsets: npt.ArrayLike, nbytes: npt.ArrayLike
    ) -> list[bool]:
        """Read many values into a region. Arguments as those of :meth:`batch_put_from`.

        Returns: per key, True when its place holds the value; False for a miss: unknown, evicted meanwhile,
        or its owner died. A missed place may have been written to in part. Raises SizeMismatch, before
        anything is moved, when a value found does not have exactly the size given for it; LeaseExpired, which
        says what was read all the same, when the lease has not held, twice.
        """
        batch = Batch(self.config.tenant, keys)
        starts, sizes = as_ranges(offsets, nbytes, len(batch), region.nbytes)
        if not len(batch):
            return []

        def fetch(reading: Reading) -> None:
            wrong = np.flatnonzero(reading.found & (reading.sizes != sizes))
            if wrong.size:
                at = int(wrong[0])
                raise SizeMismatch(
                    f"key {batch.keys[at]!r:.80} has {reading.sizes[at]} bytes, {sizes[at]} were asked for"
                )
            reading.fetch(Registered(region), starts)

        return self._read_batch(batch, fetch)

    def get_range(self, key: Key, start: int, nbytes: int) -> bytes:
        """``nbytes`` of the value from ``start`` on. Raises KeyNotFound, LeaseExpired, KeyInvalid,
        SizeMismatch when it ends before.
        """
        parts, _ = as_parts([[0, start, 0, nbytes]], READ, 1, nbytes)

        def get(handed: Handed | None) -> bytes:
            with self._read([key], handed) as reading:
                self._require(reading.found, key)
                require_inside(parts, reading.found, reading.sizes, [key])
                with Received(nbytes, self._staging) as memory:
                    reading.fetch_parts(memory, parts)
                    value = memory.value()
            require_good(reading, key)
            return value

        return twice(get)

    def get_buffer(self, key: Key) -> ValueBuffer:
        """The value as read-only memory, without a copy where it lies on this host. See ValueBuffer; close
        it.

        Raises KeyNotFound, LeaseExpired, KeyInvalid.
        """
        (buffer,) = self.batch_get_buffer([key])
        if buffer is None:
            raise missing(key)
        return buffer

    def batch_get_buffer(self, keys: Sequence[Key]) -> list[ValueBuffer | None]:
        """Buffers of many values by one call to the master, None for a miss. As :meth:`get_buffer`."""
        return twice(lambda _: open_buffers(self._read(keys), self._mover, self._staging))

    def open_value(self, key: Key) -> ValueReader:
        """A value to be read piece by piece, all of it under one lease; close it. Raises KeyNotFound,
        KeyInvalid.
        """
        return ValueReader(key, self._read([key]), self._staging)

    def read_session(self, keys: Sequence[Key]) -> ReadSession:
        """Read values piece by piece, as ``with store.read_session(keys) as session``, under one lease, which
        is renewed until the end: ``session.read_parts`` asks the master for nothing. Raises KeyInvalid.
        """
        batch = Batch(self.config.tenant, keys)
        return ReadSession(self._reading(batch), self._open_given, batch)

    def batch_get_parts_into(
        self, keys: Sequence[Key], memories: Region | Sequence[object], parts: npt.ArrayLike
    ) -> list[bool]:
        """Read parts of values, in any number and order, in one call to the master.

        Args:
            memories: where to: as those of :meth:`batch_put_parts`.
            parts: N x 4 integers: which key (its number in ``keys``), offset in its value, offset in the
                region, bytes; with several memories N x 5, the number of the memory after that of the key.

        Returns: per key, True when the value is there and all its parts have arrived; False for a miss, as
        :meth:`batch_get_into`. Raises SizeMismatch, before anything is moved, when a part reaches beyond the
        value found; LeaseExpired as there.
        """
        batch = Batch(self.config.tenant, keys)
        with ExitStack() as stack:
            opened, bounds = self._open(stack, memories, holds_data=False)
            wanted, where = as_parts(parts, READ, len(batch), bounds)
            if not len(batch):
                return []

            def fetch(reading: Reading) -> None:
                require_inside(wanted, reading.found, reading.sizes, batch.keys)
                for number, memory in enumerate(opened):
                    reading.fetch_parts(memory, wanted[where == number])

            return self._read_batch(batch, fetch)

    def _read_batch(self, batch: Batch, fetch: Callable[[Reading], None]) -> list[bool]:
        """Read all of it, or all once more when the lease has expired. Raises LeaseExpired after that."""
        for _ in range(2):
            with self._reading(batch) as reading:
                fetch(reading)
            good: list[bool] = reading.good.tolist()
            if not reading.expired.any():
                return good
        expired = np.flatnonzero(reading.expired).tolist()
        raise LeaseExpired(
            f"{len(expired)} of {len(batch)} keys were being read when their lease ended, twice, the first "
            f"is {batch.keys[expired[0]]!r:.80}: what was read of them is void; a retry is safe",
            good,
            expired,
        )

    def _open(
        self, stack: ExitStack, memories: Region | Sequence[object], *, holds_data: bool
    ) -> tuple[list[LocalMemory], int | list[int]]:
        # What to move from or to, and how large it is, or each is.
        if isinstance(memories, Region):
            return [Registered(memories)], memories.nbytes
        opened: list[LocalMemory] = []
        for memory in memories:
            if isinstance(memory, Region):
                opened.append(Registered(memory))
                continue
            array = as_bytes(memory)
            if not holds_data and not array.flags.writeable:
                raise ValueInvalid(f"the {type(memory).__name__} to read into cannot be written to")
            opened.append(stack.enter_context(Staged(array, self._staging, holds_data=holds_data)))
        return opened, [memory.array.nbytes for memory in opened]

    def _open_given(
        self, stack: ExitStack, memories: Region | Sequence[object], holds_data: bool
    ) -> tuple[list[LocalMemory], int | list[int]]:
        return self._open(stack, memories, holds_data=holds_data)

    # ---- the rest

    def exist(self, key: Key) -> bool:
        """Whether the key has a value now. Raises KeyInvalid."""
        return self.batch_exist([key])[0]

    def batch_exist(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a value now; neither counts as a use nor keeps it. Raises KeyInvalid."""
        batch = Batch(self.config.tenant, keys)
        request = protocol.Exist(digests=batch.packed)
        return as_bools(self._member.ask(request, protocol.Found).found)

    def remove(self, key: Key) -> None:
        """Make the value unfindable, at once; its bytes are freed when nobody reads them. Raises
        KeyNotFound.
        """
        if not self.batch_remove([key])[0]:
            raise KeyNotFound(f"key {key!r:.80} is not in the store, so it cannot be removed")

    def batch_remove(self, keys: Sequence[Key]) -> list[bool]:
        """Remove many; per key, whether there was something to remove. Raises KeyInvalid."""
        batch = Batch(self.config.tenant, keys)
        request = protocol.Remove(digests=batch.packed)
        return as_bools(self._member.ask(request, protocol.Found).found)

    def close(self, *, copies_wait_s: float = 20.0, hurry: threading.Event | None = None) -> None:
        """Leave the store, with everything in this segment, and give the memory back. Safe to call twice.

        ``copies_wait_s``: copies to other segments that are on their way are given up after this time, or
        when ``hurry`` is set.
        """
        self._closing.set()
        if self._copier is not None:
            self._copier.close(copies_wait_s, hurry)
        if self._fencer is not None:
            self._fencer.close(CLOSE_TIMEOUT_S)
        if self._tiers is not None:
            self._tiers.close()
        if self._membership is not None:
            self._membership.close()
        self._notices.close(CLOSE_TIMEOUT_S)
        try:
            if self._segment is not None:
                self._segment.close(CLOSE_TIMEOUT_S)
            self._staging.close()
        except TransferError as error:
            log.warning("memory of the store is freed only with its engine: %s", error)
        if self._finder is not None:
            self._finder.close()
        if self._own_master is not None:
            self._own_master.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ring(ring: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = ring()
    if method is not None:
        method()
