"""Messages between two ranks of different hosts, matched by tag in the order of sending."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mooncake_ep.pg.wire.frames import Header, Kind, Lane, header
from mooncake_ep.pg.wire.group import Group
from mooncake_ep.pg.wire.memory import view_at
from mooncake_ep.pg.wire.outcome import Code, Outcome

__all__ = ["Messages"]

ANY_SOURCE = -1
_KEPT_BYTES = 1 << 20  # of a rank that nobody waits for a message of; then the sender waits
_LOOK_S = 0.05


@dataclass
class _Send:
    number: int
    to: int
    memory: memoryview
    tag: int


@dataclass
class _Receive:
    number: int
    source: int
    memory: memoryview
    tag: int
    begun: bool = False


@dataclass
class _Kept:
    """A message that came before anybody asked for it."""

    tag: int
    memory: memoryview


@dataclass
class _Peer:
    sends: list[_Send] = field(default_factory=list)  # given to the links, not all gone yet
    kept: list[_Kept] = field(default_factory=list)
    coming: _Receive | _Kept | None = None


class Messages:
    """All under the group's lock."""

    def __init__(self, group: Group, capacity: int) -> None:
        self._group = group
        self._peers = [_Peer() for _ in range(capacity)]
        self._receives: list[_Receive] = []
        self._finished: dict[int, Outcome] = {}
        self._next = 1

    def send(self, to: int, data: int, nbytes: int, tag: int) -> int:
        """Begin to send; returns the message's number. The memory stays until it is done."""
        group = self._group
        with group.lock:
            send = _Send(self._number(), to, view_at(data, nbytes), tag)
            if self._gone(to):
                self._finish(send.number, self._lost(to))
                return send.number
            self._peers[to].sends.append(send)
            group.links.send(to, Lane.MESSAGES, header(Kind.MESSAGE, nbytes, op=tag), send.memory)
            self._prune(to)
            return send.number

    def receive(self, source: int, data: int, nbytes: int, tag: int) -> int:
        """Begin to receive; returns the message's number."""
        group = self._group
        with group.lock:
            receive = _Receive(self._number(), source, view_at(data, nbytes), tag)
            if not self._deliver_kept(receive):
                self._receives.append(receive)
                group.links.resume(None if source == ANY_SOURCE else source)
            return receive.number

    def done(self, number: int) -> bool:
        """Whether a message has ended."""
        with self._group.lock:
            self._look()
            return number in self._finished

    def finish(self, number: int, timeout_s: float) -> Outcome:
        """Wait for the end of a message and forget it."""
        group, began = self._group, time.monotonic()
        with group.lock:
            while number not in self._finished:
                if 0 <= timeout_s < time.monotonic() - began:
                    self._give_up(number)
                    return Outcome(Code.TIMEOUT, "no message came through in time")
                self._look()
                if number not in self._finished:
                    group.pause(_LOOK_S)
            return self._finished.pop(number)

    def idle(self) -> bool:
        """Whether no message is under way."""
        return not self._receives and not any(peer.sends for peer in self._peers)

    # What the links tell.

    def place(self, rank: int, head: Header) -> memoryview | None:
        """Return where a message goes; None: its sender has to wait."""
        peer = self._peers[rank]
        found = next((one for one in self._receives if self._fits(one, rank, head.op)), None)
        if found is not None and len(found.memory) == head.nbytes:
            peer.coming = found
            found.begun = True
            return found.memory
        if (
            found is None
            and not self._wanted(rank)
            and sum(len(one.memory) for one in peer.kept) > _KEPT_BYTES
        ):
            return None
        peer.coming = _Kept(head.op, memoryview(bytearray(head.nbytes)))
        return peer.coming.memory

    def arrived(self, rank: int) -> None:
        """A message is whole."""
        peer = self._peers[rank]
        coming, peer.coming = peer.coming, None
        if isinstance(coming, _Receive):
            if coming in self._receives:
                self._receives.remove(coming)
                self._finish(coming.number, Outcome(source=rank))
        elif coming is not None:
            peer.kept.append(coming)
            found = next((one for one in self._receives if self._fits(one, rank, coming.tag)), None)
            if found is not None and self._deliver_kept(found):
                self._receives.remove(found)

    def lost(self, rank: int) -> None:
        """A process has gone: what was under way to or from it ends."""
        peer = self._peers[rank]
        for send in peer.sends:
            self._finish(send.number, self._lost(rank))
        peer.sends = []
        if isinstance(peer.coming, _Receive):
            peer.coming.begun = False
        peer.coming = None
        self._bury()

    def forget(self, rank: int) -> None:
        """Another process takes a rank's place: what the former one sent is not for anybody."""
        self._peers[rank] = _Peer()

    # Within.

    def _look(self) -> None:
        for rank, peer in enumerate(self._peers):
            if peer.sends:
                self._prune(rank)
        self._bury()

    def _prune(self, rank: int) -> None:
        """End the sends that have left this process."""
        peer = self._peers[rank]
        if peer.sends and self._group.links.idle(rank, Lane.MESSAGES):
            for send in peer.sends:
                self._finish(send.number, self._lost(rank) if self._gone(rank) else Outcome())
            peer.sends = []

    def _bury(self) -> None:
        """End receives for which nobody is left."""
        everyone = all(self._gone(rank) for rank in range(len(self._peers)) if rank != self._group.rank)
        for receive in list(self._receives):
            if receive.begun:
                continue
            if receive.source == ANY_SOURCE and everyone:
                self._finish(receive.number, Outcome(Code.RANK_FAILED, "every other rank is gone"))
            elif receive.source != ANY_SOURCE and self._gone(receive.source):
                self._finish(receive.number, self._lost(receive.source))
            else:
                continue
            self._receives.remove(receive)

    def _gone(self, rank: int) -> bool:
        return rank != self._group.rank and self._group.gone(rank)

    def _lost(self, rank: int) -> Outcome:
        return Outcome(Code.RANK_FAILED, f"rank {rank} is gone, or was evicted")

    def _fits(self, receive: _Receive, rank: int, tag: int) -> bool:
        return receive.source in (ANY_SOURCE, rank) and receive.tag == tag and not receive.begun

    def _wanted(self, rank: int) -> bool:
        return any(one.source in (ANY_SOURCE, rank) for one in self._receives)

    def _deliver_kept(self, receive: _Receive) -> bool:
        """Give a message that came before to a receive; False when there is none that fits."""
        for rank, peer in enumerate(self._peers):
            if receive.source not in (ANY_SOURCE, rank):
                continue
            found = next((one for one in peer.kept if one.tag == receive.tag), None)
            if found is None:
                continue
            peer.kept.remove(found)
            self._group.links.resume(rank)
            if len(found.memory) == len(receive.memory):
                receive.memory[:] = found.memory
                self._finish(receive.number, Outcome(source=rank))
            else:
                reason = (
                    f"rank {rank} sent {len(found.memory)} bytes where {len(receive.memory)} are expected; "
                    "both sides must give tensors of one size"
                )
                self._finish(receive.number, Outcome(Code.MISMATCH, reason, source=rank))
            return True
        return False

    def _give_up(self, number: int) -> None:
        """Take a message back; of one that is under way, its memory is used until it is over."""
        self._receives = [one for one in self._receives if one.number != number]
        for peer in self._peers:
            peer.sends = [one for one in peer.sends if one.number != number]

    def _finish(self, number: int, outcome: Outcome) -> None:
        self._finished[number] = outcome
        self._group.changed.notify_all()

    def _number(self) -> int:
        self._next += 1
        return self._next
