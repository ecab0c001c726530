"""Puts and gets of one value at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import (
    ConfigError,
    KeyExists,
    PutFailed,
    QuotaExceeded,
    SizeMismatch,
    StoreFull,
)
from mooncake_store.batch import Batch, as_bytes
from mooncake_store.config import StoreConfig
from mooncake_store.keys import Key
from mooncake_store.local_memory import Buffer, Received, Registered, Staged, StagingBuffers
from mooncake_store.membership import Membership
from mooncake_store.mover import Mover
from mooncake_store.notices import Notices
from mooncake_store.own_segment import Bytes, OwnSegment
from mooncake_store.parts import as_ranges
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import IfExists, Outcome
from mooncake_store.quick import Handed, Quick, Stage
from mooncake_store.reader import Reading, missing, require_good, twice
from mooncake_store.writer import STORED, Source, Values, Writer
from mooncake_transfer import Region
from mooncake_transfer.errors import MemoryInUse, TransferError

__all__ = ["Singles", "check_if_exists"]


class Singles:
    """Base of Store."""

    config: StoreConfig
    _member: Membership
    _mover: Mover
    _writer: Writer
    _notices: Notices
    _staging: StagingBuffers
    _segment: OwnSegment | None
    _quick: Quick | None

    def put(
        self, key: Key, data: object, *, if_exists: IfExists = "error", policy: PutPolicy | None = None
    ) -> None:
        """Store the bytes of ``data``, any contiguous buffer.

        Args:
            if_exists: ``"error"`` raises KeyExists; ``"keep"`` leaves what is there; ``"replace"`` puts the
                new value in its place at once, while readers of the old one finish on the old bytes.
            policy: copies, places, pins, priority, group and session; see PutPolicy.

        Raises KeyExists, KeyInvalid, ValueInvalid, StoreFull when nothing (more) may be evicted, PutFailed,
        QuotaExceeded, RateLimited.
        """
        array = as_bytes(data)
        if self._put_quickly(key, array, if_exists, policy):
            return
        # Only read from, whatever numpy thinks it may do with it.
        with Staged(array, self._staging, holds_data=True) as memory:
            offsets, sizes = as_ranges(0, array.nbytes, 1, array.nbytes)
            batch = Batch(self.config.tenant, [key])
            self._put_one(key, Values(batch, sizes, [Source(memory, offsets)], policy), if_exists)

    def put_from(
        self,
        key: Key,
        region: Region,
        offset: int,
        nbytes: int,
        *,
        if_exists: IfExists = "error",
        policy: PutPolicy | None = None,
    ) -> None:
        """Store ``nbytes`` at ``offset`` of a region of the engine, without a copy in between. As
        :meth:`put`.
        """
        handed = self._begin_put(key, region, offset, nbytes, if_exists, policy)
        if handed is True:
            return
        offsets, sizes = as_ranges(offset, nbytes, 1, region.nbytes)
        batch = Batch(self.config.tenant, [key])
        values = Values(batch, sizes, [Source(Registered(region), offsets)], policy)
        self._put_one(key, values, if_exists, handed)

    def get(self, key: Key) -> bytes:
        """The value as bytes. Raises KeyNotFound, LeaseExpired, KeyInvalid."""
        value = self._get_quickly(key)
        if isinstance(value, bytes):
            return value
        return twice(functools.partial(self._get_slowly, key), value)

    def _get_slowly(self, key: Key, handed: Handed | None) -> bytes:
        with self._read([key], handed) as reading:
            self._require(reading.found, key)
            with Received(int(reading.sizes[0]), self._staging) as memory:
                reading.fetch(memory, np.zeros(1, dtype=np.uint64))
                value = memory.value()
        require_good(reading, key)
        return value

    def get_into(self, key: Key, region: Region, offset: int, nbytes: int) -> int:
        """Read a value of at most ``nbytes`` to ``offset`` of a region of the engine; returns its size.

        Raises KeyNotFound, LeaseExpired, KeyInvalid, ValueInvalid; SizeMismatch when the value is larger.
        """
        handed = None
        if self._quick is not None:
            done = self._quick.get_into(key, region, offset, nbytes)
            if isinstance(done, int):
                return done
            handed = self._gone_on_with(done, key)
        offsets, _ = as_ranges(offset, nbytes, 1, region.nbytes)

        def get_slowly(handed: Handed | None) -> int:
            with self._read([key], handed) as reading:
                self._require(reading.found, key)
                found = int(reading.sizes[0])
                if found > nbytes:
                    raise SizeMismatch(f"key {key!r:.80} has {found} bytes, room is for {nbytes}")
                reading.fetch(Registered(region), offsets)
            require_good(reading, key)
            return found

        return twice(get_slowly, handed)

    def _begin_put(
        self,
        key: Key,
        region: Region,
        offset: int,
        nbytes: int,
        if_exists: IfExists,
        policy: PutPolicy | None,
        memory: Registered | None = None,
    ) -> Handed | Literal[True] | None:
        """Put it, True; or as far as it goes without the interpreter; None: nothing was done.

        ``memory`` is told when a driver has not let go of the region.
        """
        quick = self._quick
        # Who listens is told of keys that this client is about to put.
        if quick is None or policy is not None or self._notices.wanted:
            return None
        check_if_exists(if_exists)
        position = self._notices.position()
        done = quick.put_from(key, region, offset, nbytes, if_exists == "replace", *position)
        if done is True:
            return True
        if memory is not None and done is not None:
            _keep_if_in_use(memory, done)
        handed = self._taken_over(done)
        # Stored, and counted; the master has told of something else besides.
        if handed is not None and handed.committed and self._writer.committed(handed)[0] == STORED:
            return True
        return handed

    def _put_quickly(self, key: Key, array: Bytes, if_exists: IfExists, policy: PutPolicy | None) -> bool:
        """Put bytes that are not registered; False when nothing was done."""
        quick = self._quick
        # Who lends memory may get room there, to which a copy is all it takes.
        if quick is None or not quick.joined or self._segment is not None:
            return False
        if array.nbytes > self.config.staging_bytes:
            return False
        try:
            region, staged = buffer = self._staging.take(array.nbytes)
        except TransferError:  # the call may need no such memory, or says what is wrong
            return False
        memory = Registered(region)
        try:
            staged[: array.nbytes] = array
            handed = self._begin_put(key, region, 0, array.nbytes, if_exists, policy, memory)
            if isinstance(handed, tuple):
                batch = Batch(self.config.tenant, [key])
                offsets, sizes = as_ranges(0, array.nbytes, 1, array.nbytes)
                values = Values(batch, sizes, [Source(memory, offsets)], policy)
                self._put_one(key, values, if_exists, handed)
        finally:
            self._done_with(buffer, memory)
        return handed is not None

    def _done_with(self, buffer: Buffer, memory: Registered) -> None:
        (self._staging.lose if memory.in_use else self._staging.give_back)(buffer)

    def _taken_over(self, left: tuple[Any, ...] | None) -> Handed | None:
        """What is to be gone on with of a call that was not usual. Raises MasterUnreachable, StoreClosed."""
        if left is None:
            return None
        handed = Handed(*left)
        return handed if self._member.take_over(handed) else None

    def _put_one(self, key: Key, values: Values, if_exists: IfExists, handed: Handed | None = None) -> None:
        check_if_exists(if_exists)
        result = self._writer.put(values, if_exists, handed)
        outcome = Outcome(result.outcomes[0])
        if outcome is Outcome.FULL:
            raise StoreFull(f"key {key!r:.80}", int(values.sizes[0]), result.room)
        if outcome is Outcome.QUOTA:
            raise QuotaExceeded(
                f"key {key!r:.80} was not stored: its {int(values.sizes[0])} bytes are more than the quota "
                f"of tenant {self.config.tenant!r} leaves; remove values, or raise quota_bytes at the master"
            )
        if outcome in (Outcome.FAILED, Outcome.LOST):
            raise PutFailed(f"key {key!r:.80} was not stored: {result.reason}; a retry is safe")
        if outcome is Outcome.EXISTS and if_exists == "error":
            raise KeyExists(f"key {key!r:.80} exists; use if_exists='keep' or 'replace', or remove it first")

    def _get_quickly(self, key: Key) -> bytes | Handed | None:
        quick = self._quick
        if quick is None or not quick.joined:
            return None
        try:
            region, _ = buffer = self._staging.take(0)
        except TransferError:  # as for puts
            return None
        memory = Registered(region)
        try:
            value = quick.get(key, region)
            if isinstance(value, tuple):
                _keep_if_in_use(memory, value)
        finally:
            self._done_with(buffer, memory)
        if isinstance(value, bytes):
            return value
        handed = self._gone_on_with(value, key)
        if handed is not None and handed.stage == Stage.MOVED:
            return handed._replace(stage=Stage.ANSWERED)  # to memory that is not this call's any more
        return handed

    def _gone_on_with(self, left: tuple[Any, ...] | None, key: Key) -> Handed | None:
        """As :meth:`_taken_over`, of a read. Raises KeyNotFound, too."""
        handed = self._taken_over(left)
        if handed is not None and handed.stage == Stage.MISSING:
            raise missing(key)
        return handed

    def _read(self, keys: Sequence[Key], handed: Handed | None = None) -> Reading:
        return self._reading(Batch(self.config.tenant, keys), handed)

    def _reading(self, batch: Batch, handed: Handed | None = None) -> Reading:
        return Reading(self._member, self._mover, batch, self.config.transfer_timeout_s, handed)

    @staticmethod
    def _require(there: npt.NDArray[np.bool_], key: Key) -> None:
        if not there[0]:
            raise missing(key)


def _keep_if_in_use(memory: Registered, left: tuple[Any, ...]) -> None:
    failure = Handed(*left).failure
    # After Ctrl-C nothing says whether a driver has let go.
    if isinstance(failure, MemoryInUse) or not isinstance(failure, Exception | None):
        memory.keep()


def check_if_exists(if_exists: str) -> None:
    """Raises ConfigError for what is none of them."""
    if if_exists not in ("error", "keep", "replace"):
        raise ConfigError(f"if_exists is {if_exists!r}; it must be 'error', 'keep' or 'replace'")
