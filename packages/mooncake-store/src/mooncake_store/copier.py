"""Copies values of this client's segment to others, as its master plans it."""

from __future__ import annotations

import logging
import math
import threading
import time

import numpy as np

from mooncake_store import protocol
from mooncake_store._errors import StoreError
from mooncake_store.config import StoreConfig
from mooncake_store.local_memory import Registered
from mooncake_store.membership import Membership
from mooncake_store.mover import Layout, Mover
from mooncake_store.notices import Notices
from mooncake_store.own_segment import OwnSegment
from mooncake_store.parts import INSIDE, NBYTES, OFFSET, POSITION, SEGMENT, Uints
from mooncake_store.protocol import Placement
from mooncake_store.time_budget import TimeBudget
from mooncake_store.writer import DEADLINE_MARGIN
from mooncake_transfer.errors import TransferError

__all__ = ["Copier"]

# On their way at a time; it bounds what copies take of the bandwidth of puts and gets.
COPY_BYTES = 64 << 20
GIVE_UP_TIMEOUT_S = 5.0
HURRY_POLL_S = 0.05

log = logging.getLogger(__name__)


class Copier:
    """One thread, which starts when there is something to copy for the first time.

    A copy is one write from this segment to another one; of a value that lies in several segments, a read of
    all of it and a write. The source is leased and the room reserved until the deadline, as for a put.
    """

    def __init__(
        self,
        membership: Membership,
        mover: Mover,
        segment: OwnSegment,
        notices: Notices,
        config: StoreConfig,
    ) -> None:
        self._membership = membership
        self._mover = mover
        self._segment = segment
        self._notices = notices
        self._config = config
        self._changed = threading.Condition()
        self._woken = self._closed = self._given_up = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """The master has, or may have, something to copy. Never blocks."""
        with self._changed:
            if self._closed:
                return
            self._woken = True
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mooncake-store-copier", daemon=True)
                self._thread.start()

    def close(self, wait_s: float, hurry: threading.Event | None = None) -> None:
        """End the thread, after the batch that is on its way; that is given up after ``wait_s``, or when
        ``hurry`` is set.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        until_s = time.monotonic() + wait_s
        while self._thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
            if hurry is not None and hurry.is_set():
                break
            self._thread.join(left_s if hurry is None else min(left_s, HURRY_POLL_S))
        if self._thread.is_alive():
            self._given_up = True
            # The store closes: nothing else of it is to move any more, either.
            self._mover.keep_only(set(), math.inf)
            self._thread.join(GIVE_UP_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._closed)
                self._woken = False
            try:
                while not self._closed and self._turn():
                    pass
            except (StoreError, TransferError) as error:
                log.debug("copies wait for the master: %s", error)
            if self._closed:
                return

    def _turn(self) -> bool:
        """Make one batch of copies; whether there may be more."""
        asked_s = time.monotonic()
        request = protocol.TakeCopies(most_bytes=COPY_BYTES)
        todo = self._membership.ask(request, protocol.CopiesToMake)
        if not todo.copy:
            return todo.more
        until_s = asked_s + DEADLINE_MARGIN * self._membership.reservation_ttl_s
        keys, failed = [b""] * (len(todo.versions) // 8), set(range(len(todo.versions) // 8))
        try:
            keys = self._keys(todo)
            skipped = {position for position, key in enumerate(keys) if not key}
            # Only now: had the move been left by an error, nobody could say what has its bytes.
            failed = skipped | self._move(todo, request.epoch, skipped, until_s)
        finally:  # at once: what is leased for it could not be evicted meanwhile
            end = protocol.EndCopies(copy=todo.copy, failed=sorted(failed), keys=keys)
            self._membership.conclude(end, request.epoch, protocol.CopiesEnded)
        return todo.more

    def _keys(self, todo: protocol.CopiesToMake) -> list[bytes]:
        versions = np.frombuffer(todo.versions, dtype="<u8").tolist()
        keys = [self._notices.key_of(version) for version in versions]
        if not all(keys):  # records of what was stored last come lazily
            self._membership.catch_up()
            keys = [key or self._notices.key_of(version) for key, version in zip(keys, versions, strict=True)]
        return keys

    def _move(self, todo: protocol.CopiesToMake, epoch: int, skipped: set[int], until_s: float) -> set[int]:
        """Which copies, by position, have not all their bytes."""
        source = _rows(todo.source, skipped)
        elsewhere = source[:, SEGMENT] != np.uint64(self._segment.id)
        staged = set(source[elsewhere, POSITION].tolist())
        direct = set(source[:, POSITION].tolist()) - staged
        failed = self._write_direct(todo, _only(source, direct), epoch, until_s) if direct else set()
        for position in sorted(staged):
            try:
                moved = not self._given_up and self._copy_staged(
                    todo, _only(source, {position}), epoch, until_s
                )
            except TransferError as error:  # no memory for it, or a late transfer still has it
                log.warning("a copy did not move: %s", error)
                moved = False
            if not moved:
                failed.add(position)
        return failed

    def _write_direct(
        self, todo: protocol.CopiesToMake, source: Uints, epoch: int, until_s: float
    ) -> set[int]:
        with self._segment.bytes_of(epoch, self._segment.id) as lent:
            region = self._segment.region
            if lent is None or region is None:
                return set(source[:, POSITION].tolist())
            parts = source[:, [POSITION, INSIDE, OFFSET, NBYTES]]
            layout = Layout.of_parts(_target(todo), parts, epoch)
            moved = self._mover.write(
                Registered(region), layout, self._limit_s(layout, until_s), compare=True
            )
        if moved.failed:
            log.warning("%d copies did not move: %s", len(moved.failed), moved.reason)
        return moved.failed

    def _copy_staged(self, todo: protocol.CopiesToMake, source: Uints, epoch: int, until_s: float) -> bool:
        position, nbytes = int(source[0, POSITION]), int(source[:, NBYTES].sum())
        with self._mover.engine.allocate(nbytes, name="store-copy") as region:
            offsets = np.zeros(position + 1, dtype=np.uint64)
            placement = Placement(rows=source.astype("<u8").tobytes(), segments=todo.source.segments)
            layout = Layout(placement, offsets, epoch)
            moved = self._mover.read(Registered(region), layout, self._limit_s(layout, until_s), compare=True)
            if not moved.failed:
                rows = _only(_rows(_target(todo), set()), {position})
                placement = Placement(rows=rows.astype("<u8").tobytes(), segments=todo.source.segments)
                layout = Layout(placement, offsets, epoch)
                moved = self._mover.write(
                    Registered(region), layout, self._limit_s(layout, until_s), compare=True
                )
        if moved.failed:
            log.warning("a copy did not move: %s", moved.reason)
        return not moved.failed

    def _limit_s(self, layout: Layout, until_s: float) -> float:
        return min(until_s, TimeBudget(self._config.transfer_timeout_s).begin(layout.nbytes, tries=1))


def _target(todo: protocol.CopiesToMake) -> Placement:
    return Placement(rows=todo.target.rows, segments=todo.source.segments)


def _rows(placement: Placement, skipped: set[int]) -> Uints:
    rows = np.frombuffer(placement.rows, dtype="<u8").reshape(-1, 5)
    return rows[~np.isin(rows[:, POSITION], list(skipped))] if skipped else rows


def _only(rows: Uints, positions: set[int]) -> Uints:
    return rows[np.isin(rows[:, POSITION], list(positions))]
