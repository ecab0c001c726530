"""Moves the bytes of a batch between local memory and the segments, all segments at once."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import StoreClosed
from mooncake_store.own_segment import Bytes, OwnSegment
from mooncake_store.protocol import Placement
from mooncake_transfer import Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import ConfigError, EngineClosed, RegionClosed, TransferError

__all__ = ["Layout", "LocalMemory", "Moved", "Mover", "Uints"]

Uints = npt.NDArray[np.uint64]
ABORT_TIMEOUT_S = 5.0
POSITION, INSIDE, SEGMENT, OFFSET, NBYTES = range(5)

log = logging.getLogger(__name__)


class LocalMemory(Protocol):
    """This process's side of a move."""

    @property
    def array(self) -> Bytes:
        """All of it, flat."""
        ...

    def region(self) -> Region:
        """Memory of the engine with the same bytes at the same offsets, or in which they can arrive."""
        ...

    def arrived(self, blocks: Uints) -> None:
        """These blocks (local offset, offset in the segment, bytes) have been read into :meth:`region`."""
        ...


class Layout(NamedTuple):
    """Where the values of a batch lie on both sides.

    ``offsets`` has the local offset of each value, by its position in the batch; ``epoch`` is that of the
    master which gave the placement.
    """

    placement: Placement
    offsets: Uints
    epoch: int

    def by_segment(self) -> list[tuple[int, Uints]]:
        """Rows of the placement (see :class:`Placement`), for each segment."""
        rows = np.frombuffer(self.placement.rows, dtype="<u8").reshape(-1, 5)
        segments = np.unique(rows[:, SEGMENT]).tolist()
        return [(segment, rows[rows[:, SEGMENT] == segment]) for segment in segments]

    def blocks(self, rows: Uints) -> Uints:
        """Local offset, offset in the segment and bytes of each piece; neighbours on both sides joined."""
        local = self.offsets[rows[:, POSITION].astype(np.intp)] + rows[:, INSIDE]
        there, nbytes = rows[:, OFFSET], rows[:, NBYTES]
        goes_on = (local[1:] == local[:-1] + nbytes[:-1]) & (there[1:] == there[:-1] + nbytes[:-1])
        first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        return np.stack((local[first], there[first], np.add.reduceat(nbytes, first)), axis=1)


@dataclass(slots=True)
class Moved:
    """What did not move.

    Attributes:
        failed: positions in the batch of values with bytes that did not move.
        segments: the segments to or from which they did not.
        reason: of the first failure.
    """

    failed: set[int] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)
    reason: str = ""

    def note(self, segment: int, rows: Uints, reason: str) -> None:
        """These rows did not move."""
        self.failed.update(rows[:, POSITION].tolist())
        self.segments.add(segment)
        self.reason = self.reason or reason


class Mover:
    """Knows how to reach every segment. Thread-safe."""

    def __init__(self, engine: TransferEngine, own: OwnSegment | None, connect_timeout_s: float) -> None:
        self.engine = engine
        self.own = own
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._remotes: dict[int, tuple[bytes, RemoteRegion]] = {}

    def write(self, memory: LocalMemory, layout: Layout, deadline_s: float) -> Moved:
        """Move every value of the batch to its segments, until ``deadline_s`` of the monotonic clock at most.

        A segment that cannot be reached fails its own values only. Raises StoreClosed.
        """
        return _Move(self, True, memory, layout, deadline_s).run()

    def read(self, memory: LocalMemory, layout: Layout) -> Moved:
        """Move every value of the batch from its segments; otherwise as :meth:`write`."""
        return _Move(self, False, memory, layout, None).run()

    def remote(self, segment: int, descriptor: bytes) -> RemoteRegion:
        """The segment as the engine reaches it. Raises what ``import_region`` of the engine does."""
        with self._lock:
            known = self._remotes.get(segment)
        if known is not None and known[0] == descriptor:
            return known[1]
        remote = self.engine.import_region(descriptor, timeout_s=self._connect_timeout_s)
        with self._lock:
            self._remotes[segment] = (descriptor, remote)
        return remote

    def forget(self, segment: int) -> None:
        """Reach the segment anew next time."""
        with self._lock:
            self._remotes.pop(segment, None)

    def keep_only(self, segments: set[int]) -> None:
        """Forget segments that exist no more."""
        with self._lock:
            for segment in [segment for segment in self._remotes if segment not in segments]:
                del self._remotes[segment]


class _Move:
    """One batch on its way, in one direction."""

    def __init__(
        self, mover: Mover, write: bool, memory: LocalMemory, layout: Layout, deadline_s: float | None
    ) -> None:
        self._mover = mover
        self._write = write
        self._memory = memory
        self._layout = layout
        self._deadline_s = deadline_s
        self._moved = Moved()
        self._running: list[tuple[int, Uints, Uints, Transfer]] = []

    def run(self) -> Moved:
        """Start everything the engine moves, copy meanwhile what lies in this process, then wait for the
        engine.
        """
        try:
            self._run()
        except BaseException:
            # The memory is the caller's again as soon as this is left.
            for _, _, _, transfer in self._running:
                self._abort(transfer)
            raise
        return self._moved

    def _run(self) -> None:
        own, at_hand = self._mover.own, []
        for segment, rows in self._layout.by_segment():
            if own is not None and own.holds(self._layout.epoch, segment):
                at_hand.append((own, segment, rows))
            else:
                self._start(segment, rows)
        for own, segment, rows in at_hand:
            self._copy(own, segment, rows)
        for segment, rows, blocks, transfer in self._running:
            self._finish(segment, rows, blocks, transfer)

    @staticmethod
    def _abort(transfer: Transfer) -> None:
        transfer.cancel()
        try:
            transfer.wait(ABORT_TIMEOUT_S)
        except TransferError as error:
            log.debug("a transfer was given up: %s", error)

    def _start(self, segment: int, rows: Uints) -> None:
        engine, blocks = self._mover.engine, self._layout.blocks(rows)
        region = self._memory.region()
        try:
            remote = self._mover.remote(segment, self._layout.placement.segments[segment])
            move = engine.write if self._write else engine.read
            self._running.append((segment, rows, blocks, move(region, remote, blocks)))
        except (ConfigError, RegionClosed):
            raise  # about the caller's own region: a mistake, not bad luck
        except TransferError as error:
            self._fail(segment, rows, error)

    def _finish(self, segment: int, rows: Uints, blocks: Uints, transfer: Transfer) -> None:
        try:
            transfer.wait(None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic()))
        except TransferError as error:
            self._fail(segment, rows, error)
        else:
            if not self._write:
                self._memory.arrived(blocks)

    def _fail(self, segment: int, rows: Uints, error: TransferError) -> None:
        if isinstance(error, EngineClosed):
            raise StoreClosed(f"the transfer engine of this store has been closed: {error}") from error
        log.info("%d pieces in segment %d did not move: %s", len(rows), segment, error)
        self._moved.note(segment, rows, str(error))
        self._mover.forget(segment)

    def _copy(self, own: OwnSegment, segment: int, rows: Uints) -> None:
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self._moved.note(segment, rows, "the deadline passed before the bytes could be copied")
            return
        with own.bytes_of(self._layout.epoch, segment) as lent:
            if lent is None:
                self._moved.note(segment, rows, "the segment of this process was exchanged meanwhile")
                return
            array = self._memory.array
            for here, there, nbytes in self._layout.blocks(rows).tolist():
                if self._write:
                    lent[there : there + nbytes] = array[here : here + nbytes]
                else:
                    array[here : here + nbytes] = lent[there : there + nbytes]
