"""The store as a client sees it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mooncake_store import protocol
from mooncake_store._errors import ConfigError, KeyExists, KeyNotFound, PutFailed, SizeMismatch, StoreFull
from mooncake_store.batch import Batch, as_bytes, as_ranges
from mooncake_store.config import StoreConfig
from mooncake_store.keys import Key
from mooncake_store.link import Link, LocalLink, open_remote
from mooncake_store.local_memory import Registered, Staged, StagingBuffers
from mooncake_store.master import Master, master_of
from mooncake_store.membership import Membership
from mooncake_store.mover import Mover
from mooncake_store.notices import Notices
from mooncake_store.own_segment import Bytes, OwnSegment
from mooncake_store.protocol import IfExists, Outcome, StoreStats, notice_method
from mooncake_store.reader import Reading
from mooncake_store.writer import Values, Writer
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import TransferError

__all__ = ["Store"]

CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Store:
    """A client of the distributed store. Thread-safe; a context manager. Close it before its engine.

    Keys are text or bytes, values any bytes, stored as a whole or not at all. A value read is always one
    that was put under exactly this key, whole, or a miss: never a mix, never something else's bytes. Values
    may be evicted at any time when room is needed, and are lost with the process that lends the memory they
    lie in.

    Every call may raise MasterUnreachable (at once while the master is away, else after ``call_timeout_s``;
    the client comes back by itself, with an empty segment) and StoreClosed.
    """

    def __init__(
        self,
        engine: TransferEngine,
        master: str | Master | None = None,
        *,
        lend_bytes: int = 0,
        config: StoreConfig | None = None,
    ) -> None:
        """Join a master, or be one.

        Args:
            engine: moves the bytes; must outlive the store.
            master: ``host:port`` of a master's engine; or a Master of this process; or None: this store
                brings its own, which others reach at ``engine.address``.
            lend_bytes: memory of this process that the store may use.
            config: see StoreConfig.

        Raises MasterUnreachable, MasterRefused, ConfigError, and MemoryUnavailable of the engine when it
        has no ``lend_bytes``. Nothing is left behind then.
        """
        if lend_bytes < 0:
            raise ConfigError(f"lend_bytes is {lend_bytes}; it must be 0 or more")
        self.config = config or StoreConfig()
        self._engine = engine
        self._closing = threading.Event()
        self._own_master: Master | None = None
        if master is None:
            master = self._own_master = Master(engine, self.config)
        self._segment: OwnSegment | None = None
        self._notices = Notices(self.config.tenant)
        self._staging = StagingBuffers(engine, self.config.staging_bytes)
        self._membership: Membership | None = None
        try:
            self._segment = OwnSegment(engine, lend_bytes) if lend_bytes else None
            self._mover = Mover(engine, self._segment, self.config.connect_timeout_s)
            self._member = self._join(master)
        except BaseException:
            self.close()
            raise
        self._writer = Writer(self._member, self._mover, self._notices, self.config, self._closing)

    def _join(self, master: str | Master) -> Membership:
        member = self._membership = Membership(
            lambda: self._open_link(master), self.config, self._segment, self._notices, self._mover.keep_only
        )
        # The engine keeps the handler for good; it must not keep the store with it.
        ring = weakref.WeakMethod(member.ring)
        self._engine.serve(notice_method(member.client), lambda payload, caller: _ring(ring))
        member.start()
        return member

    def _open_link(self, master: str | Master) -> Link:
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
    def master(self) -> Master | None:
        """The master this store brought itself, or None."""
        return self._own_master

    # ---- puts

    def put(self, key: Key, data: object, *, if_exists: IfExists = "error") -> None:
        """Store the bytes of ``data``, any contiguous buffer.

        Args:
            if_exists: ``"error"`` raises KeyExists; ``"keep"`` leaves what is there; ``"replace"`` puts the
                new value in its place at once, while readers of the old one finish on the old bytes.

        Raises KeyExists, KeyInvalid, ValueInvalid, StoreFull when nothing (more) may be evicted, PutFailed.
        """
        array = as_bytes(data)
        # Only read from, whatever numpy thinks it may do with it.
        with Staged(array, self._staging, holds_data=True) as memory:
            offsets, sizes = as_ranges(0, array.nbytes, 1, array.nbytes)
            self._put_one(key, Values(Batch(self.config.tenant, [key]), memory, offsets, sizes), if_exists)

    def put_from(
        self, key: Key, region: Region, offset: int, nbytes: int, *, if_exists: IfExists = "error"
    ) -> None:
        """Store ``nbytes`` at ``offset`` of a region of the engine, without a copy in between. As
        :meth:`put`.
        """
        offsets, sizes = as_ranges(offset, nbytes, 1, region.nbytes)
        batch = Batch(self.config.tenant, [key])
        self._put_one(key, Values(batch, Registered(region), offsets, sizes), if_exists)

    def batch_put_from(
        self,
        keys: Sequence[Key],
        region: Region,
        offsets: npt.ArrayLike,
        nbytes: npt.ArrayLike,
        *,
        if_exists: IfExists = "keep",
    ) -> list[bool]:
        """Store many values of a region, the most important (a prefix's first blocks) first.

        Args:
            offsets: where they lie in the region, one integer per key; a numpy array is the fast form.
            nbytes: their sizes, one per key or one for all.

        Returns: per key, True when it was stored now; False when it was there already, when there was no
        room that could be made, or when its bytes could not be moved. Raises KeyExists with
        ``if_exists="error"`` when a key was there (the other values are stored), KeyInvalid, ValueInvalid.
        """
        _check_if_exists(if_exists)
        batch = Batch(self.config.tenant, keys)
        starts, sizes = as_ranges(offsets, nbytes, len(batch), region.nbytes)
        result = self._writer.put(Values(batch, Registered(region), starts, sizes), if_exists)
        if if_exists == "error" and Outcome.EXISTS in result.outcomes:
            taken = [batch.keys[i] for i, outcome in enumerate(result.outcomes) if outcome is Outcome.EXISTS]
            raise KeyExists(f"{len(taken)} of {len(batch)} keys exist, the first is {taken[0]!r:.80}")
        not_moved = sum(outcome in (Outcome.FAILED, Outcome.LOST) for outcome in result.outcomes)
        if not_moved:
            log.warning("%d of %d values were not stored: %s", not_moved, len(batch), result.reason)
        return [outcome is Outcome.STORED for outcome in result.outcomes]

    def _put_one(self, key: Key, values: Values, if_exists: IfExists) -> None:
        _check_if_exists(if_exists)
        result = self._writer.put(values, if_exists)
        (outcome,) = result.outcomes
        if outcome is Outcome.FULL:
            raise StoreFull(f"key {key!r:.80}", int(values.sizes[0]), result.room)
        if outcome in (Outcome.FAILED, Outcome.LOST):
            raise PutFailed(f"key {key!r:.80} was not stored: {result.reason}; a retry is safe")
        if outcome is Outcome.EXISTS and if_exists == "error":
            raise KeyExists(f"key {key!r:.80} exists; use if_exists='keep' or 'replace', or remove it first")

    # ---- gets

    def get(self, key: Key) -> bytes:
        """The value as bytes. Raises KeyNotFound, KeyInvalid."""
        with self._read([key]) as reading:
            self._require(reading.found, key)
            value: Bytes = np.empty(int(reading.sizes[0]), dtype=np.uint8)
            with Staged(value, self._staging, holds_data=False) as memory:
                reading.fetch(memory, np.zeros(1, dtype=np.uint64))
        self._require(reading.good, key)
        return value.tobytes()

    def get_into(self, key: Key, region: Region, offset: int, nbytes: int) -> int:
        """Read a value of at most ``nbytes`` to ``offset`` of a region of the engine; returns its size.

        Raises KeyNotFound, KeyInvalid, ValueInvalid; SizeMismatch when the value is larger.
        """
        offsets, room = as_ranges(offset, nbytes, 1, region.nbytes)
        with self._read([key]) as reading:
            self._require(reading.found, key)
            if reading.sizes[0] > room[0]:
                raise SizeMismatch(f"key {key!r:.80} has {reading.sizes[0]} bytes, room is for {nbytes}")
            reading.fetch(Registered(region), offsets)
        self._require(reading.good, key)
        return int(reading.sizes[0])

    def batch_get_into(
        self, keys: Sequence[Key], region: Region, offsets: npt.ArrayLike, nbytes: npt.ArrayLike
    ) -> list[bool]:
        """Read many values into a region. Arguments as those of :meth:`batch_put_from`.

        Returns: per key, True when its place holds the value; False for a miss: unknown, evicted meanwhile,
        or its owner died. A missed place may have been written to in part. Raises SizeMismatch, before
        anything is moved, when a value found does not have exactly the size given for it.
        """
        batch = Batch(self.config.tenant, keys)
        starts, sizes = as_ranges(offsets, nbytes, len(batch), region.nbytes)
        if not len(batch):
            return []
        with Reading(self._member, self._mover, batch) as reading:
            wrong = np.flatnonzero(reading.found & (reading.sizes != sizes))
            if wrong.size:
                at = int(wrong[0])
                raise SizeMismatch(
                    f"key {batch.keys[at]!r:.80} has {reading.sizes[at]} bytes, {sizes[at]} were asked for"
                )
            reading.fetch(Registered(region), starts)
        return [bool(good) for good in reading.good]

    def _read(self, keys: Sequence[Key]) -> Reading:
        return Reading(self._member, self._mover, Batch(self.config.tenant, keys))

    @staticmethod
    def _require(there: npt.NDArray[np.bool_], key: Key) -> None:
        if not there[0]:
            raise KeyNotFound(
                f"key {key!r:.80} is not in the store: never put, evicted, or lost with its owner"
            )

    # ---- the rest

    def exist(self, key: Key) -> bool:
        """Whether the key has a value now. Raises KeyInvalid."""
        return self.batch_exist([key])[0]

    def batch_exist(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a value now; neither counts as a use nor keeps it. Raises KeyInvalid."""
        batch = Batch(self.config.tenant, keys)
        request = protocol.Exist(digests=batch.digests.tobytes())
        return [bool(found) for found in self._member.ask(request, protocol.Found).found]

    def remove(self, key: Key) -> None:
        """Make the value unfindable, at once; its bytes are freed when nobody reads them. Raises
        KeyNotFound.
        """
        if not self.batch_remove([key])[0]:
            raise KeyNotFound(f"key {key!r:.80} is not in the store, so it cannot be removed")

    def batch_remove(self, keys: Sequence[Key]) -> list[bool]:
        """Remove many; per key, whether there was something to remove. Raises KeyInvalid."""
        batch = Batch(self.config.tenant, keys)
        request = protocol.Remove(digests=batch.digests.tobytes())
        return [bool(found) for found in self._member.ask(request, protocol.Found).found]

    def on_evicted(self, handler: Callable[[list[bytes]], None]) -> None:
        """Call ``handler(keys)`` when values that lay in this store's segment, or that it put, have gone.

        Gone means evicted, removed, replaced by somebody else's value elsewhere, or lost with their owner.
        Only keys of this store's tenant are told. The handler runs on a thread of its own, in the master's
        order. What went before a put of this store was committed is told before that put returns; a handler
        must therefore not wait for a lock that is held during a put (such a put goes on after
        ``notice_wait_s``, with a warning).
        """
        self._notices.on_evicted(handler)

    def on_cleared(self, handler: Callable[[], None]) -> None:
        """Call ``handler()`` when this store's segment has lost all it held: the master was lost and found.

        Same thread and order as ``on_evicted``, which is not called for those values.
        """
        self._notices.on_cleared(handler)

    def stats(self) -> StoreStats:
        """Numbers of the whole store."""
        return self._member.ask(protocol.GetStats(), StoreStats)

    def close(self) -> None:
        """Leave the store, with everything in this segment, and give the memory back. Safe to call twice."""
        self._closing.set()
        if self._membership is not None:
            self._membership.close()
        self._notices.close(CLOSE_TIMEOUT_S)
        try:
            if self._segment is not None:
                self._segment.close(CLOSE_TIMEOUT_S)
            self._staging.close()
        except TransferError as error:
            log.warning("memory of the store is freed only with its engine: %s", error)
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


def _check_if_exists(if_exists: str) -> None:
    if if_exists not in ("error", "keep", "replace"):
        raise ConfigError(f"if_exists is {if_exists!r}; it must be 'error', 'keep' or 'replace'")
