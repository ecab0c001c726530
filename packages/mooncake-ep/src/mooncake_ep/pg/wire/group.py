"""One rank of a group between hosts: the agreement with its connections, and operations that end by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncake_ep.pg.wire.agreement import (
    Action,
    Agreement,
    Cut,
    Ended,
    Entered,
    Fenced,
    Out,
    Send,
    View,
)
from mooncake_ep.pg.wire.faults import FaultPlan, Point
from mooncake_ep.pg.wire.frames import Header, Kind, Lane, decode, encode, header
from mooncake_ep.pg.wire.links import LARGEST, Links
from mooncake_ep.pg.wire.outcome import Again, Code, Stop

__all__ = ["Attempt", "Group", "Life"]

Life = tuple[int, int]
_SILENCE_S = 0.3  # three beats
_GRACE_S = 1.0  # for the others to say what they found, or to run an operation again
_SLOWEST = 20e6  # bytes a second that an operation run again is given time for
_WAKE_S = 0.5
_LINKING_S = 10.0  # for two that came in to find each other, on hosts that are busy
_SIGNATURE_BYTES = 8
_LARGEST_BODY = 64 << 20
_EVICTED = (
    "rank {} was too late: the others evicted it and go on without it; "
    "join_group() waits until they take it back by recover_ranks()"
)


@dataclass
class Attempt:
    """One run of an operation in one view."""

    view: View
    op: int
    rank: int
    openings: dict[int, memoryview] = field(default_factory=dict)
    posted: dict[tuple[int, int], memoryview] = field(default_factory=dict)
    got: set[tuple[int, int]] = field(default_factory=set)

    @property
    def others(self) -> list[int]:
        """Members but this rank; from the one that follows it on, so that not all begin with the same."""
        members = self.view.members
        at = members.index(self.rank)
        return [*members[at + 1 :], *members[:at]]


class Group:
    """State that the threads of an engine share, under `lock`; `changed` is told of all that happens."""

    def __init__(self, rank: int, view: View) -> None:
        self.rank = rank
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.agreement = Agreement(rank, view)
        self.faults = FaultPlan()
        self.links: Links
        self.view_of_last: View = view  # in which the last operation ended
        self._past: set[int] = set()
        self._attempt: Attempt | None = None
        self._early: dict[tuple[int, int], dict[int, memoryview]] = {}  # openings of what comes next
        self._sink = memoryview(bytearray(LARGEST))
        self._view = view
        self._entered = time.monotonic()
        self._held: dict[int, list[tuple[Lane, bytes, memoryview | bytes]]] = {}  # for who is not connected
        self.deadline = 0.0  # of the operation under way

    def restart(self, view: View, awaits: int | None) -> None:
        """Begin anew: alone, or waiting to be let in as process `awaits`."""
        self._past.add(self._view.key)
        self.agreement = Agreement(self.rank, view, self.agreement.ended, awaits=awaits)
        self._view = self.view_of_last = view
        self._entered = time.monotonic()
        self._forget_past()

    # What has come: called by the links.

    def place(self, rank: int, lane: Lane, head: Header) -> memoryview | None:
        """See `links.Receiver`; DATA goes where the operation that it is of has posted."""
        if lane is Lane.CONTROL:
            if head.nbytes > _LARGEST_BODY:
                raise OSError(f"{head.nbytes} bytes in one frame of rank {rank}")
            return memoryview(bytearray(head.nbytes))
        attempt = self._attempt
        if attempt is not None and (head.view, head.op) == (attempt.view.key, attempt.op):
            memory = attempt.posted.get((rank, head.slot))
            if memory is not None and len(memory) != head.nbytes:
                return self._sink[: head.nbytes]  # ranks that called different operations
            return memory
        stale = head.view in self._past or head.op <= self.agreement.ended
        return self._sink[: head.nbytes] if stale else None

    def take(self, rank: int, head: Header, payload: memoryview) -> None:
        """Take a frame of the lanes CONTROL and DATA."""
        if head.kind == Kind.DATA:
            attempt = self._attempt
            if attempt is not None and (head.view, head.op) == (attempt.view.key, attempt.op):
                attempt.got.add((rank, head.slot))
                self.changed.notify_all()
        elif head.kind == Kind.OPEN:
            if head.view in self._past or (head.view == self._view.key and head.op <= self.agreement.ended):
                return
            self._early.setdefault((head.view, head.op), {})[rank] = payload
            self.changed.notify_all()
        elif (message := decode(head, payload.tobytes())) is not None:
            self.do(self.agreement.receive(rank, message))

    def do(self, actions: Sequence[Action]) -> None:
        """Do what the agreement says."""
        for action in actions:
            if isinstance(action, Send):
                self._send(action.to, Lane.CONTROL, *encode(action.message))
            elif isinstance(action, Cut):
                self.links.send(action.rank, Lane.CONTROL, *encode(Out()))
                self.links.cut(action.rank)
            elif isinstance(action, Ended):
                self.view_of_last = action.view
            elif isinstance(action, Entered):
                self._enter(action.view)
            elif isinstance(action, Fenced):
                for rank in self.links.ranks():
                    self.links.cut(rank)
        if actions:
            self.changed.notify_all()

    def _enter(self, view: View) -> None:
        self._past.add(self._view.key)
        self._view, self._entered = view, time.monotonic()
        self.links.abandon(self._sink)
        self._held.clear()
        self._forget_past()
        self.links.resume()

    def _forget_past(self) -> None:
        for key in [key for key in self._early if key[0] in self._past]:
            del self._early[key]

    def _send(self, rank: int, lane: Lane, head: bytes, payload: memoryview | bytes = b"") -> None:
        """Send to a member; one that came in with others may not have connected to this rank yet."""
        if self.links.life(rank) == 0:
            self._held.setdefault(rank, []).append((lane, head, payload))
        else:
            self.links.send(rank, lane, head, payload)

    def linked(self, rank: int, life: int) -> None:
        """A process has connected: if it is the member that was meant, it gets what was kept for it."""
        held = self._held.pop(rank, [])
        if (rank, life) in self.agreement.view.lives:
            for lane, head, payload in held:
                self.links.send(rank, lane, head, payload)
        else:
            self.do(self.agreement.suspect([rank]))  # its successor is here
        self.changed.notify_all()

    # Operations.

    def run(
        self,
        signature: int,
        attempt: Callable[[Attempt], Sequence[Life] | None],
        nbytes: int,
        deadline: float,
        opening: Callable[[int], memoryview | bytes] = lambda _: b"",
    ) -> View:
        """Run an operation until it ends; returns the view of its contributors.

        `attempt` moves the bytes, once or several times. It returns whom the group lets in at its end.
        `opening(rank)` goes to each rank with the announcement; short data. Raises Stop.
        """
        self.faults.at(Point.BEFORE_PUBLISH)
        while True:
            with self.lock:
                self._await_view(deadline)
                current = self._attempt = self._begin()
            try:
                self._open(current, signature, opening)
                grows = self._checked(current, signature, attempt, deadline)
                return self._finish(current, grows or (), deadline)
            except Again:
                deadline = max(deadline, time.monotonic() + _GRACE_S + nbytes / _SLOWEST)
            finally:
                with self.lock:
                    self._early.pop((current.view.key, current.op), None)
                    self._attempt = None
                    self.links.resume()

    def _begin(self) -> Attempt:
        view, op = self.agreement.view, self.agreement.ended + 1
        return Attempt(view, op, self.rank, self._early.setdefault((view.key, op), {}))

    def _open(self, current: Attempt, signature: int, opening: Callable[[int], memoryview | bytes]) -> None:
        for rank in current.others:
            body = signature.to_bytes(_SIGNATURE_BYTES, "little") + bytes(opening(rank))
            head = header(Kind.OPEN, len(body), view=current.view.key, op=current.op)
            with self.lock:
                self._send(rank, Lane.CONTROL, head, body)
        self.faults.at(Point.AFTER_PUBLISH)

    def _checked(
        self,
        current: Attempt,
        signature: int,
        attempt: Callable[[Attempt], Sequence[Life] | None],
        deadline: float,
    ) -> Sequence[Life] | None:
        """Run one attempt, unless ranks called different operations: then that is how it ends, for all."""

        def absent() -> set[int]:
            return set(current.others) - current.openings.keys()

        self.wait(lambda: not absent(), absent, current, deadline)
        for rank, body in current.openings.items():
            if int.from_bytes(body[:_SIGNATURE_BYTES], "little") != signature:
                self._finish(current, (), deadline)
                raise Stop(
                    Code.MISMATCH,
                    f"rank {rank} called another collective, or this one with another size, type or root, "
                    f"than rank {self.rank}; all ranks must call the same collectives in the same order",
                )
        self.deadline = deadline
        return attempt(current)

    def _finish(self, current: Attempt, grows: Sequence[Life], deadline: float) -> View:
        agreement = self.agreement
        with self.lock:
            if agreement.view.key == current.view.key:
                self.do(agreement.complete(current.op, grows))
        self.wait(
            lambda: agreement.ended >= current.op or agreement.view.key != current.view.key,
            lambda: agreement.unheard() if agreement.changing else agreement.incomplete(),
            None,
            deadline,
            direct=False,
        )
        if agreement.ended < current.op:
            raise Again
        return current.view

    def opening(self, current: Attempt, rank: int) -> memoryview:
        """Return what another rank sent with its announcement."""
        return current.openings[rank][_SIGNATURE_BYTES:]

    def post(self, current: Attempt, rank: int, slot: int, memory: memoryview) -> None:
        """Say where a part goes that another rank sends."""
        with self.lock:
            current.posted[rank, slot] = memory
            self.links.resume(rank)

    def send(self, current: Attempt, rank: int, slot: int, memory: memoryview) -> None:
        """Send a part, of at most LARGEST bytes. The memory stays as it is until the operation ends."""
        head = header(Kind.DATA, len(memory), view=current.view.key, op=current.op, slot=slot)
        with self.lock:
            if self.agreement.view.key != current.view.key:
                raise Again
            self._send(rank, Lane.DATA, head, memory)

    def receive(self, current: Attempt, wanted: set[tuple[int, int]]) -> None:
        """Wait for parts."""
        self.wait(
            lambda: wanted <= current.got,
            lambda: {rank for rank, _ in wanted - current.got},
            current,
            self.deadline,
        )
        self.faults.at(Point.WHILE_READING)

    # Waiting.

    def wait(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], set[int]],
        current: Attempt | None,
        deadline: float,
        *,
        direct: bool = True,
    ) -> None:
        """Wait; past the deadline, evict whom `missing` names: those who are silent, if there are any.

        Not `direct`: others may be late only because they wait, too; they evict whom they miss. Raises Again
        when the view of the attempt is no longer that of the group, Stop when this rank is out of it.
        """
        with self.lock:
            while not ready():
                self.check_in()
                if current is not None and self._left(current):
                    raise Again
                self._suspect_unlinked()
                left = deadline - time.monotonic()
                if left > 0:
                    self.pause(min(left, _WAKE_S))
                elif not self._looked(ready):
                    late = missing()
                    silent = {rank for rank in late if self.links.silent_s(rank) > _SILENCE_S}
                    if direct or silent or left < -_GRACE_S:
                        self.do(self.agreement.suspect(silent or late))
                    self.pause(_SILENCE_S / 3)

    def pause(self, limit_s: float) -> None:
        """Wait until something may have changed, with the lock held once."""
        if not self.links.pump(limit_s):
            self.changed.wait(limit_s)

    def gone(self, rank: int) -> bool:
        """Whether a rank can no longer answer: dead, evicted, or no member."""
        with self.lock:
            return rank not in self.agreement.view.members or self.links.life(rank) == 0

    def _suspect_unlinked(self) -> None:
        """A member that came in with others may never connect to this rank, if it died."""
        if time.monotonic() - self._entered < _LINKING_S:
            return
        view = self.agreement.view
        lost = {rank for rank, _ in view.lives if rank != self.rank and self.links.life(rank) == 0}
        if lost - self.agreement.suspects:
            self.do(self.agreement.suspect(lost))

    def _left(self, current: Attempt) -> bool:
        agreement = self.agreement
        return agreement.changing or agreement.view.key != current.view.key

    def _await_view(self, deadline: float) -> None:
        """Wait until no change of the view is under way."""
        self.wait(lambda: not self.agreement.changing, self.agreement.unheard, None, deadline)
        self.check_in()

    def _looked(self, ready: Callable[[], bool]) -> bool:
        """Look at all that has come: this process may have been the one that was stopped."""
        before = self.links.look()
        until = time.monotonic() + _GRACE_S
        while self.links.look() < before + 2 and time.monotonic() < until:
            self.pause(0.005)
        return ready() or self.agreement.fenced

    def check_in(self) -> None:
        """Raise Stop if this rank is out of the group."""
        if self.agreement.fenced:
            raise Stop(Code.EVICTED, _EVICTED.format(self.rank))
