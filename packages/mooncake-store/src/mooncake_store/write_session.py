"""Many values written piece by piece under one reservation, without a call to the master for each piece."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mooncake_store import protocol
from mooncake_store._errors import PutFailed, StoreError
from mooncake_store.batch import Batch
from mooncake_store.mover import Layout, LocalMemory
from mooncake_store.parts import READ, Uints, as_parts, as_ranges, require_inside
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import IfExists, Outcome
from mooncake_store.writer import DEADLINE_MARGIN, Writer
from mooncake_transfer import Region

__all__ = ["OpenMemories", "WriteSession"]

RENEW_AFTER = 0.3  # of the time that a reservation lives

Opened = tuple[list[LocalMemory], int | list[int]]
OpenMemories = Callable[[ExitStack, Region | Sequence[object], bool], Opened]

log = logging.getLogger(__name__)


class WriteSession:
    """Values being written; a context manager, for one thread at a time. See ``Store.write_session``.

    Attributes:
        placed: per key, whether there is room for its value; parts of others are left out.
        stored: per key, whether its value can be found now; set at the end of the context.
    """

    def __init__(
        self,
        writer: Writer,
        open_memories: OpenMemories,
        batch: Batch,
        nbytes: npt.ArrayLike,
        if_exists: IfExists,
        policy: PutPolicy | None,
    ) -> None:
        self._writer, self._open_memories, self._batch = writer, open_memories, batch
        self._if_exists: IfExists = if_exists
        _, self.sizes = as_ranges(np.zeros(len(batch), np.uint64), nbytes, len(batch), 2**63)
        self._policy = policy
        self._reserved: protocol.Reserved
        self._epoch = 0
        self._renewed_s = 0.0
        self._written: list[Uints] = []
        self._failed: set[int] = set()
        self._silent: set[int] = set()  # segments that are not waited for again
        self._reason = ""
        self.placed: npt.NDArray[np.bool_] = np.zeros(len(batch), dtype=np.bool_)
        self.stored: npt.NDArray[np.bool_] = np.zeros(len(batch), dtype=np.bool_)

    def __enter__(self) -> WriteSession:
        """Reserve. Raises MasterError, RateLimited, StoreClosed."""
        writer, batch = self._writer, self._batch
        writer.require(self._policy)
        request = protocol.Reserve(
            digests=batch.packed,
            keys=batch.keys,
            sizes=self.sizes.astype("<u8").tobytes(),
            if_exists=self._if_exists,
            avoid=[],
            policy=self._policy,
        )
        if writer.notices.wanted:
            writer.notices.wrote(request.digests, request.keys)
        self._renewed_s = time.monotonic()
        self._reserved = writer.membership.ask(request, protocol.Reserved)
        self._epoch = request.epoch
        self.placed = np.frombuffer(self._reserved.outcomes, dtype=np.uint8) == Outcome.PLACED
        return self

    def write_parts(self, memories: Region | Sequence[object], parts: npt.ArrayLike) -> None:
        """Write parts of the values.

        Args:
            memories: as those of ``Store.batch_put_parts``.
            parts: N x 4 integers: which key (its number), offset in its value, offset in the region, bytes;
                with several memories N x 5, the number of the memory after that of the key.

        Between two calls no more time may pass than ``reservation_ttl_s`` of the master. Raises ValueInvalid,
        SizeMismatch for a part beyond its value, PutFailed when the reservation has ended.
        """
        with ExitStack() as stack:
            opened, bounds = self._open_memories(stack, memories, True)
            wanted, where = as_parts(parts, READ, len(self._batch), bounds)
            require_inside(wanted, np.ones(len(self._batch), dtype=np.bool_), self.sizes, self._batch.keys)
            deadline_s = self._renew()
            for number, memory in enumerate(opened):
                here = wanted[(where == number) & ~np.isin(wanted[:, 0], list(self._failed))]
                layout = Layout.of_parts(self._reserved.placement, here, self._epoch)
                moved = self._writer.write(memory, layout, deadline_s, self._silent)
                self._failed |= moved.failed
                self._silent |= moved.silent
                self._reason = self._reason or moved.reason
            self._written.append(wanted)

    def _renew(self) -> float:
        """Make the reservation live on when it has lived for a while; until when may be written."""
        ttl_s, reservation = self._writer.membership.reservation_ttl_s, self._reserved.reservation
        now_s = time.monotonic()
        if reservation and now_s > self._renewed_s + RENEW_AFTER * ttl_s:
            # First the keys: those of the time of a reservation's last renewal are the last that it has.
            self._writer.membership.reach(self._reserved.placement.segments, self._epoch)
            request = protocol.Renew(reservation=reservation)
            answer = self._writer.membership.conclude(request, self._epoch, protocol.Found)
            if answer is None or not answer.found[0]:
                raise PutFailed("the reservation of this session has ended; nothing of it is stored")
            self._renewed_s = now_s
        return self._renewed_s + DEADLINE_MARGIN * ttl_s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        placed = np.flatnonzero(self.placed).tolist()
        if not placed:
            return
        whole = set() if error is not None else self._whole()
        failed = [number for number, at in enumerate(placed) if at not in whole]
        try:
            outcomes = self._writer.commit(
                self._reserved.reservation, self._epoch, failed, len(placed), self._if_exists
            )
        except StoreError as problem:
            if error is None:
                raise
            log.debug("a reservation was not revoked, it will expire: %s", problem)
            return
        for at, outcome in zip(placed, outcomes, strict=True):
            self.stored[at] = outcome == Outcome.STORED
        missing = self.placed & ~self.stored
        if error is None and missing.any():
            log.warning(
                "%d of %d values of a session were not stored: %s",
                int(np.count_nonzero(missing)),
                len(placed),
                self._reason or "not all of their bytes were written, or their keys were taken meanwhile",
            )

    def _whole(self) -> set[int]:
        """Positions of the values all of whose bytes have arrived."""
        empty: Uints = np.empty((0, 4), dtype=np.uint64)
        parts = np.concatenate([empty, *self._written])
        parts = parts[np.lexsort((parts[:, 1], parts[:, 0]))]
        whole = set()
        for at in np.flatnonzero(self.placed).tolist():
            end = 0
            first, last = np.searchsorted(parts[:, 0], [at, at + 1])
            for _, start, _, nbytes in parts[first:last].tolist():
                if start > end:
                    break
                end = max(end, start + nbytes)
            if end == self.sizes[at] and at not in self._failed:
                whole.add(at)
        return whole
