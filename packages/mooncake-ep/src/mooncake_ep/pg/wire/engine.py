"""One rank of a process group whose ranks are of several hosts, with the compiled engine's interface."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from mooncake_ep.pg.wire.agreement import View
from mooncake_ep.pg.wire.collectives import Collectives, Span
from mooncake_ep.pg.wire.frames import Header, Kind, Lane
from mooncake_ep.pg.wire.greeting import Address
from mooncake_ep.pg.wire.group import Group
from mooncake_ep.pg.wire.hierarchy import Hierarchy
from mooncake_ep.pg.wire.members import Members, new_life
from mooncake_ep.pg.wire.messages import Messages
from mooncake_ep.pg.wire.neighbours import Outbox
from mooncake_ep.pg.wire.outcome import Code, Outcome, Stop
from mooncake_ep.pg.wire.reduction import Reduction
from mooncake_ep.pg.wire.sockets import Identity, SocketLinks

__all__ = ["WireEngine"]

Work = Callable[[float], list[int]]
_FOREVER_S = 1e9
_LOOK_S = 0.05


class WireEngine:
    """See the stub of `_core.GroupEngine`; what a call returns is an `Outcome`, or None as there."""

    def __init__(self, capacity: int, rank: int, secret: bytes, hosts: tuple[str, ...], host: str) -> None:
        life = new_life()
        self.capacity = capacity
        self._rank = rank
        self._group = group = Group(rank, View(0, 0, ((rank, life),)))
        self._outbox = Outbox(host)
        self._members = Members(group, life)
        self._collectives = Collectives(
            group, capacity, Hierarchy(group, self._outbox, self._members.lent_by)
        )
        self._messages = Messages(group, capacity)
        self._running = threading.RLock()
        self._tasks: deque[tuple[int, Work, float]] = deque()
        self._results: dict[int, Outcome] = {}
        self._unfinished = 0
        self._ticket = 0
        self._worker: threading.Thread | None = None
        self._closed = False
        self._owner = os.getpid()
        group.links = SocketLinks(Identity(rank, life, secret, hosts, self._outbox.lent), group.lock, self)

    # What the links tell; see links.Receiver.

    def place(self, rank: int, lane: Lane, head: Header) -> memoryview | None:
        """Say where a payload goes."""
        if lane is Lane.MESSAGES:
            return self._messages.place(rank, head)
        return self._group.place(rank, lane, head)

    def arrived(self, rank: int, lane: Lane, head: Header, payload: memoryview) -> None:
        """Take a whole frame."""
        if lane is Lane.MESSAGES:
            self._messages.arrived(rank)
        elif head.kind == Kind.BOOK:
            self._members.learn(rank, payload.tobytes())
        else:
            self._group.take(rank, head, payload)

    def linked(self, rank: int, life: int) -> None:
        """A process has connected."""
        self._messages.forget(rank)
        self._group.linked(rank, life)
        self._members.tell(rank)

    def lost(self, rank: int) -> None:
        """A process is gone."""
        self._group.do(self._group.agreement.suspect([rank]))
        self._messages.lost(rank)
        self._group.changed.notify_all()

    # Collectives.

    def all_reduce(
        self, data: int, count: int, type: int, op: int, factor: float, timeout_s: float, queued: bool
    ) -> object:
        """See `GroupEngine`."""
        reduction = Reduction(type, op, factor)
        return self._call(
            lambda until: self._collectives.all_reduce(reduction, data, count, until), timeout_s, queued
        )

    def reduce_to(
        self,
        root: int,
        data: int,
        count: int,
        type: int,
        op: int,
        factor: float,
        timeout_s: float,
        queued: bool,
    ) -> object:
        """See `GroupEngine`."""
        reduction = Reduction(type, op, factor)
        return self._call(
            lambda until: self._collectives.reduce_to(root, reduction, data, count, until), timeout_s, queued
        )

    def reduce_scatter(
        self,
        out: int,
        inputs: Sequence[Span],
        type: int,
        op: int,
        factor: float,
        timeout_s: float,
        queued: bool,
    ) -> object:
        """See `GroupEngine`."""
        reduction = Reduction(type, op, factor)
        return self._call(
            lambda until: self._collectives.reduce_scatter(reduction, out, inputs, until), timeout_s, queued
        )

    def all_gather(
        self, outs: Sequence[Span], data: int, nbytes: int, timeout_s: float, queued: bool
    ) -> object:
        """See `GroupEngine`."""
        return self._call(
            lambda until: self._collectives.all_gather(outs, data, nbytes, until), timeout_s, queued
        )

    def all_gather_even(
        self, out: int, ranks: int, data: int, nbytes: int, timeout_s: float, queued: bool
    ) -> object:
        """See `GroupEngine`."""
        outs = [(out + rank * nbytes, nbytes) for rank in range(ranks)]
        return self.all_gather(outs, data, nbytes, timeout_s, queued)

    def gather(
        self, root: int, outs: Sequence[Span], data: int, nbytes: int, timeout_s: float, queued: bool
    ) -> object:
        """See `GroupEngine`."""
        return self._call(
            lambda until: self._collectives.gather(root, outs, data, nbytes, until), timeout_s, queued
        )

    def broadcast(self, root: int, data: int, nbytes: int, timeout_s: float, queued: bool) -> object:
        """See `GroupEngine`."""
        return self._call(
            lambda until: self._collectives.broadcast(root, data, nbytes, until), timeout_s, queued
        )

    def scatter(
        self, root: int, out: int, nbytes: int, inputs: Sequence[Span], timeout_s: float, queued: bool
    ) -> object:
        """See `GroupEngine`."""
        return self._call(
            lambda until: self._collectives.scatter(root, out, nbytes, inputs, until), timeout_s, queued
        )

    def all_to_all(
        self, outs: Sequence[Span], inputs: Sequence[Span], timeout_s: float, queued: bool
    ) -> object:
        """See `GroupEngine`."""
        return self._call(lambda until: self._collectives.all_to_all(outs, inputs, until), timeout_s, queued)

    def barrier(self, timeout_s: float, queued: bool) -> object:
        """See `GroupEngine`."""
        return self._call(self._collectives.barrier, timeout_s, queued)

    # Running them.

    def _call(self, work: Work, timeout_s: float, queued: bool) -> object:
        if queued:
            return self._queue(work, timeout_s)
        outcome = self._in_order(work, timeout_s)
        return None if outcome.code == Code.DONE else outcome

    def _in_order(self, work: Work, timeout_s: float) -> Outcome:
        """Run after all that is queued."""
        if self._unfinished:
            return self._wait_for(self._queue(work, timeout_s), -1.0)
        return self._run(work, timeout_s)

    def _run(self, work: Work, timeout_s: float) -> Outcome:
        with self._running:
            if self._closed:
                return Outcome(Code.INVALID, "this process group was destroyed")
            before = self.members
            deadline = time.monotonic() + (timeout_s if 0 <= timeout_s < _FOREVER_S else _FOREVER_S)
            try:
                contributors = work(deadline)
            except Stop as stop:
                return Outcome(stop.code, str(stop))
            except OSError as error:
                return Outcome(Code.SYSTEM, f"{error}")
            except BaseException:  # a signal's handler raised: nobody can tell how far the operation came
                self._members.leave()
                raise
            return Outcome(Code.DONE if contributors == before else Code.PARTIAL, "", contributors)

    def _queue(self, work: Work, timeout_s: float) -> int:
        with self._group.lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="mooncake-pg-queue", daemon=True)
                self._worker.start()
            self._ticket += 1
            self._tasks.append((self._ticket, work, timeout_s))
            self._unfinished += 1
            self._group.changed.notify_all()
            return self._ticket

    def _work(self) -> None:
        changed = self._group.changed
        while True:
            with changed:
                while not self._tasks and not self._closed:
                    changed.wait()
                if self._closed:
                    return
                ticket, work, timeout_s = self._tasks.popleft()
            outcome = self._run(work, timeout_s)
            with changed:
                self._results[ticket] = outcome
                self._unfinished -= 1
                changed.notify_all()

    def done(self, ticket: int) -> bool:
        """See `GroupEngine`."""
        with self._group.lock:
            return ticket in self._results

    def finish(self, ticket: int, timeout_s: float) -> object:
        """See `GroupEngine`."""
        outcome = self._wait_for(ticket, timeout_s)
        return None if outcome.code == Code.DONE else outcome

    def _wait_for(self, ticket: int, timeout_s: float) -> Outcome:
        began, changed = time.monotonic(), self._group.changed
        with changed:
            while ticket not in self._results:
                if self._closed:
                    return Outcome(Code.INVALID, "this process group was destroyed")
                if 0 <= timeout_s < time.monotonic() - began:
                    return Outcome(Code.TIMEOUT, "the collective has not ended in time; it goes on")
                changed.wait(_LOOK_S)
            return self._results.pop(ticket)

    # Messages.

    def send(self, to: int, data: int, nbytes: int, tag: int) -> int:
        """See `GroupEngine`."""
        return self._messages.send(to, data, nbytes, tag)

    def receive(self, source: int, data: int, nbytes: int, tag: int) -> int:
        """See `GroupEngine`."""
        return self._messages.receive(source, data, nbytes, tag)

    def message_done(self, number: int) -> bool:
        """See `GroupEngine`."""
        return self._messages.done(number)

    def finish_message(self, number: int, timeout_s: float) -> Outcome:
        """See `GroupEngine`."""
        return self._messages.finish(number, timeout_s)

    def move_messages_aside(self) -> None:
        """The links' own thread moves them."""

    # Members.

    def waits(self, rank: int) -> bool:
        """See `GroupEngine`."""
        return self._members.waits(rank)

    def gone(self, rank: int) -> bool:
        """See `GroupEngine`."""
        return rank != self._rank and self._group.gone(rank)

    def address(self) -> Address:
        """Return where this process is reached."""
        return self._group.links.address()

    def know(self, addresses: Mapping[int, Address]) -> None:
        """Take over where other processes are reached."""
        with self._group.lock:
            self._members.book.update(addresses)

    def found(self, ranks: Sequence[int], timeout_s: float) -> Outcome:
        """See `GroupEngine`."""
        return self._run(lambda until: self._members.found(ranks, until), timeout_s)

    def admit(self, ranks: Sequence[int], timeout_s: float) -> Outcome:
        """See `GroupEngine`."""
        return self._in_order(lambda until: self._members.admit(ranks, until), timeout_s)

    def expel(self, ranks: Sequence[int], timeout_s: float) -> Outcome:
        """See `GroupEngine`."""
        return self._in_order(lambda until: self._members.expel(ranks, until), timeout_s)

    def join(self, timeout_s: float) -> Outcome:
        """See `GroupEngine`."""
        return self._in_order(self._members.join, timeout_s)

    def plan_fault(self, point: int, nth: int, kill: bool) -> None:
        """See `GroupEngine`."""
        self._group.faults.set(point, nth, kill)

    def close(self) -> None:
        """See `GroupEngine`."""
        if self._closed or self._owner != os.getpid():  # a forked child: the rank is its parent's
            return
        self._closed = True
        with self._group.lock:
            self._group.agreement.fenced = True
            self._group.changed.notify_all()
        self._group.links.close()
        self._outbox.close()

    @property
    def members(self) -> list[int]:
        """See `GroupEngine`."""
        return list(self._group.view_of_last.members)

    @property
    def joined(self) -> bool:
        """See `GroupEngine`."""
        return self._members.joined
