"""Moves the bytes of a batch between local memory and the segments, all segments at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from mooncake_store._core import lay_out
from mooncake_store._errors import StoreClosed
from mooncake_store.checksums import crosses_network, may_compare
from mooncake_store.own_segment import Bytes, OwnSegment
from mooncake_store.parts import NBYTES, POSITION, SEGMENT, Uints, cut
from mooncake_store.protocol import Placement
from mooncake_transfer import Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import (
    CallTimeout,
    ConfigError,
    EngineClosed,
    IntegrityError,
    MemoryInUse,
    NoRoute,
    PeerUnreachable,
    RegionClosed,
    RegionRefused,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from mooncake_store.quick import Quick
    from mooncake_store.tiers.reading import TierClient

__all__ = ["Layout", "LocalMemory", "Moved", "Mover"]

ABORT_TIMEOUT_S = 5.0
ROW_BYTES = 40  # of a placement

log = logging.getLogger(__name__)


class LocalMemory(Protocol):
    """This process's side of a move."""

    @property
    def array(self) -> Bytes:
        """All of it, flat."""
        ...

    @property
    def readable(self) -> bool:
        """Whether this process can look into it."""
        ...

    @property
    def content(self) -> Bytes:
        """What has arrived, or is to be written, flat, at the same offsets."""
        ...

    def region(self) -> Region:
        """Memory of the engine with the same bytes at the same offsets, or in which they can arrive."""
        ...

    def arrived(self, blocks: Uints) -> None:
        """These blocks (local offset, offset in the segment, bytes) have been read into :meth:`region`."""
        ...

    def keep(self) -> None:
        """A driver does not let go of :meth:`region`: it is nobody else's until the engine is closed."""
        ...


class Layout(NamedTuple):
    """Where the values of a batch lie on both sides.

    ``offsets`` has the local offset of each value, by its position in the batch; ``epoch`` is that of the
    master which gave the placement. Where only parts of values move, each part has a position of its own,
    and ``owners`` says which value it belongs to.
    """

    placement: Placement
    offsets: Uints
    epoch: int
    owners: Uints | None = None

    @classmethod
    def of_parts(cls, placement: Placement, parts: Uints, epoch: int) -> Layout:
        """Lay out parts of values: rows of position, offset inside the value, local offset, bytes."""
        rows = cut(np.frombuffer(placement.rows, dtype="<u8").reshape(-1, 5), parts)
        placement = Placement(rows=rows.astype("<u8").tobytes(), segments=placement.segments)
        return cls(placement, parts[:, 2], epoch, parts[:, 0])

    @property
    def rows(self) -> Uints:
        """The rows of the placement."""
        rows: Uints = np.frombuffer(self.placement.rows, dtype="<u8").reshape(-1, 5)
        return rows

    @property
    def nbytes(self) -> int:
        """How many bytes are to move."""
        rows = self.placement.rows
        if len(rows) == ROW_BYTES:  # the usual piece alone, the fast way
            return int.from_bytes(rows[8 * NBYTES :], "little")
        return int(np.frombuffer(rows, dtype="<u8").reshape(-1, 5)[:, NBYTES].sum())

    def positions(self, segment: int) -> list[int]:
        """Which values of the batch have pieces in the segment."""
        rows = np.frombuffer(self.placement.rows, dtype="<u8").reshape(-1, 5)
        found = rows[rows[:, SEGMENT] == segment, POSITION]
        positions: list[int] = (found if self.owners is None else self.owners[found.astype(np.intp)]).tolist()
        return positions

    def by_segment(self) -> list[tuple[int, Uints]]:
        """For each segment: local offset, offset in the segment and bytes of each piece; those that follow
        each other on both sides joined.
        """
        return lay_out(self.placement.rows, self.offsets)


@dataclass(slots=True)
class Moved:
    """What did not move.

    Attributes:
        failed: positions in the batch of values with bytes that did not move.
        segments: the segments to or from which they did not.
        silent: those of them that exist no more or whose owners did not answer.
        refused: whether an owner did not know the access key (any more).
        reason: of the first failure.
        differed: pieces that were compared at both ends, and did not arrive as they were sent.
    """

    failed: set[int] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    refused: bool = False
    reason: str = ""
    differed: int = 0

    def note(self, segment: int, positions: list[int], reason: str) -> None:
        """Something of these values did not move."""
        self.failed.update(positions)
        self.segments.add(segment)
        self.reason = self.reason or reason

    def add(self, other: Moved) -> None:
        """Something did not move there either."""
        self.failed |= other.failed
        self.segments |= other.segments
        self.silent |= other.silent
        self.refused |= other.refused
        self.reason = self.reason or other.reason
        self.differed += other.differed


class Mover:
    """Knows how to reach every segment. Thread-safe."""

    def __init__(self, engine: TransferEngine, own: OwnSegment | None, connect_timeout_s: float) -> None:
        self.engine = engine
        self.own = own
        self._connect_timeout_s = connect_timeout_s
        self.tiers: TierClient | None = None  # how values of tiers are reached
        self.quick: Quick | None = None  # is told how segments are reached, too
        self._lock = threading.Lock()
        self._remotes: dict[int, tuple[bytes, RemoteRegion]] = {}
        self._far: set[int] = set()  # segments of _remotes that are reached over a network
        self._maps: dict[int, tuple[bytes, Bytes | None]] = {}
        self._moving: dict[Transfer, tuple[int, float]] = {}  # the segment, and when it began

    def write(
        self,
        memory: LocalMemory,
        layout: Layout,
        deadline_s: float,
        avoid: Container[int] = (),
        *,
        compare: bool = False,
    ) -> Moved:
        """Move every value of the batch to its segments, until ``deadline_s`` of the monotonic clock at most.

        ``compare``: at both ends, what goes over a network.

        A segment that is to be avoided, cannot be reached, does not answer or exists no more fails its own
        values only. Raises StoreClosed.
        """
        return _Move(self, True, memory, layout, deadline_s, avoid, compare).run()

    def read(
        self,
        memory: LocalMemory,
        layout: Layout,
        deadline_s: float,
        avoid: Container[int] = (),
        *,
        compare: bool = False,
    ) -> Moved:
        """Move every value of the batch from its segments; otherwise as :meth:`write`."""
        return _Move(self, False, memory, layout, deadline_s, avoid, compare).run()

    def is_far(self, segment: int) -> bool:
        """Whether the segment has been reached, and over a network."""
        return segment in self._far

    def knows(self, segment: int) -> bool:
        """Whether the segment has been reached before."""
        return segment in self._remotes

    def remote(self, segment: int, descriptor: bytes, deadline_s: float) -> RemoteRegion:
        """The segment as the engine reaches it. Raises what ``import_region`` of the engine does."""
        known = self._remotes.get(segment)
        if known is not None and known[0] == descriptor:
            return known[1]
        # Who does not even answer leaves half of the time to segments that are reached after it.
        limit_s = min(self._connect_timeout_s, max(0.0, deadline_s - time.monotonic()) / 2)
        remote = self.engine.import_region(descriptor, timeout_s=limit_s)
        far = crosses_network(self.engine, remote)
        with self._lock:
            self._remotes[segment] = (descriptor, remote)
            (self._far.add if far else self._far.discard)(segment)
            if self.quick is not None:
                self.quick.know(segment, descriptor, remote, far)
        return remote

    def mapped(self, epoch: int, segment: int, descriptor: bytes) -> Bytes | None:
        """A segment of this host as memory of this process, read-only; None for others."""
        own = self.own
        if own is not None and own.holds(epoch, segment):
            with own.bytes_of(epoch, segment, descriptor) as lent:
                return lent
        with self._lock:
            known = self._maps.get(segment)
        if known is not None and known[0] == descriptor:
            return known[1]
        try:
            remote = self.remote(segment, descriptor, time.monotonic() + self._connect_timeout_s)
            found = np.frombuffer(remote.map(), dtype=np.uint8)
        except (NoRoute, RegionRefused) as error:
            log.info("values of segment %x are copied: %s", segment, error)
            found = None
        except TransferError as error:
            log.info("values of segment %x are copied for now: %s", segment, error)
            return None
        with self._lock:
            self._maps[segment] = (descriptor, found)
        return found

    def forget(self, segment: int) -> None:
        """Reach the segment anew next time."""
        with self._lock:
            self._remotes.pop(segment, None)
            self._maps.pop(segment, None)
            if self.quick is not None:
                self.quick.forget(segment)

    def keep_only(self, segments: set[int], asked_s: float) -> None:
        """Forget other segments, and end what moves to or from them: they exist no more.

        The master was asked at ``asked_s`` of the monotonic clock; it may not have known then what has begun
        to move since.
        """
        with self._lock:
            # Each for itself: a map may have been made since its segment was forgotten.
            for known in (self._remotes, self._maps):
                for segment in [segment for segment in known if segment not in segments]:
                    del known[segment]
        in_vain = [
            transfer
            for transfer, (segment, began_s) in self._moving.copy().items()  # as others go on
            if segment not in segments and began_s < asked_s
        ]
        if self.quick is not None:
            self.quick.keep_only(list(segments), asked_s)
        for transfer in in_vain:
            transfer.cancel()

    def failed(self, moved: Moved, layout: Layout, segment: int, count: int, error: BaseException) -> None:
        """Note why what was to move to or from a segment, in ``count`` pieces, did not. Raises StoreClosed,
        and errors that are about the caller's own region or none of the engine's: mistakes, not bad luck.
        """
        if not isinstance(error, TransferError) or isinstance(error, (ConfigError, RegionClosed)):
            raise error
        if isinstance(error, EngineClosed):
            raise StoreClosed(f"the transfer engine of this store has been closed: {error}") from error
        gone = isinstance(error, TransferCancelled)  # by keep_only
        reason = f"{error}: the master has segment {segment:x} no more" if gone else str(error)
        silent = gone or isinstance(error, (TransferTimeout, CallTimeout, PeerUnreachable))
        level = logging.WARNING if silent else logging.INFO
        log.log(level, "%d pieces of segment %x did not move: %s", count, segment, reason)
        moved.note(segment, layout.positions(segment), reason)
        moved.differed += isinstance(error, IntegrityError)
        if silent:
            moved.silent.add(segment)
        moved.refused |= isinstance(error, RegionRefused)
        self.forget(segment)

    def begun(self, transfer: Transfer, segment: int) -> None:
        """It moves to or from the segment, until :meth:`ended`."""
        self._moving[transfer] = (segment, time.monotonic())

    def ended(self, transfer: Transfer) -> None:
        """Undo :meth:`begun`."""
        self._moving.pop(transfer, None)


class _Move:
    """One batch on its way, in one direction."""

    def __init__(
        self,
        mover: Mover,
        write: bool,
        memory: LocalMemory,
        layout: Layout,
        deadline_s: float,
        avoid: Container[int],
        compare: bool,
    ) -> None:
        self._mover = mover
        self._compare = compare
        self._write = write
        self._memory = memory
        self._layout = layout
        self._deadline_s = deadline_s
        self._avoid = avoid
        self._moved = Moved()
        self._running: list[tuple[int, Uints, Transfer]] = []

    def run(self) -> Moved:
        """Start everything the engine moves, copy meanwhile what lies in this process, then wait for the
        engine.
        """
        try:
            self._run()
        except BaseException:
            # The memory is the caller's again as soon as this is left.
            for _, _, transfer in self._running:
                self._abort(transfer, self._memory)
            raise
        finally:
            for _, _, transfer in self._running:
                self._mover.ended(transfer)
        return self._moved

    def _run(self) -> None:
        own, at_hand = self._mover.own, []
        pieces = self._layout.by_segment()
        if len(pieces) > 1:
            # An owner that is reached for the first time may be silent: it comes last, and holds up no other.
            pieces.sort(key=lambda piece: not self._mover.knows(piece[0]))
        for segment, blocks in pieces:
            if own is not None and own.holds(self._layout.epoch, segment):
                at_hand.append((own, segment, blocks))
            elif segment in self._avoid:
                silent = f"the owner of segment {segment:x} did not answer before"
                self._moved.note(segment, self._layout.positions(segment), silent)
            else:
                self._start(segment, blocks)
        for own, segment, blocks in at_hand:
            self._copy(own, segment, blocks)
        for segment, blocks, transfer in self._running:
            self._finish(segment, blocks, transfer)

    @staticmethod
    def _abort(transfer: Transfer, memory: LocalMemory) -> None:
        transfer.cancel()
        try:
            transfer.wait(ABORT_TIMEOUT_S)
        except TransferError as error:
            log.debug("a transfer was given up: %s", error)
            if isinstance(error, MemoryInUse):
                memory.keep()

    def _start(self, segment: int, blocks: Uints) -> None:
        engine = self._mover.engine
        region = self._memory.region()
        try:
            descriptor = self._layout.placement.segments[segment]
            remote = self._mover.remote(segment, descriptor, self._deadline_s)
            move = engine.write if self._write else engine.read
            compare = self._compare and self._mover.is_far(segment) and may_compare(region, remote)
            transfer = move(region, remote, blocks, verify=compare or None)
        except TransferError as error:
            return self._mover.failed(self._moved, self._layout, segment, len(blocks), error)
        self._running.append((segment, blocks, transfer))
        self._mover.begun(transfer, segment)

    def _finish(self, segment: int, blocks: Uints, transfer: Transfer) -> None:
        try:
            transfer.wait(max(0.0, self._deadline_s - time.monotonic()))
        except TransferError as error:
            if isinstance(error, MemoryInUse):
                self._memory.keep()
            self._mover.failed(self._moved, self._layout, segment, len(blocks), error)
        else:
            if not self._write:
                self._memory.arrived(blocks)

    def _copy(self, own: OwnSegment, segment: int, blocks: Uints) -> None:
        if self._write and time.monotonic() >= self._deadline_s:
            late = "the deadline passed before the bytes could be copied"
            self._moved.note(segment, self._layout.positions(segment), late)
            return
        descriptor = self._layout.placement.segments.get(segment)
        with own.bytes_of(self._layout.epoch, segment, descriptor) as lent:
            if lent is None:
                gone = "the segment of this process was exchanged meanwhile"
                self._moved.refused = True
                self._moved.note(segment, self._layout.positions(segment), gone)
                return
            array = self._memory.array
            for here, there, nbytes in blocks.tolist():
                if self._write:
                    lent[there : there + nbytes] = array[here : here + nbytes]
                else:
                    array[here : here + nbytes] = lent[there : there + nbytes]
