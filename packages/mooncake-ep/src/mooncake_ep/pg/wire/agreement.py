"""Who is in a group between hosts, and which operations have ended there: agreed without a coordinator.

One rank's side of it, a state machine without I/O and clock: methods take what happened and return what
to do.

Members of one *view* run the same operations in order. Whoever has all that an operation brings it tells
every other member (Completed); the operation has ended for whoever has heard that from all. So when one rank
knows that it ended, every member has its results.

Whoever suspects a member tells the others whom it suspects and what it knows (Suspects); they take its
suspicion over and say so in turn. A rank that has heard the same suspects from every other rank that is left
goes to the next view, and tells (NewView). As what a rank suspects only grows, and nothing is taken from a
suspect, two ranks of the next view cannot have decided differently. The operation that was under way has
ended, with the view's members as its contributors, if anyone left knows that, or if all of them together
know of each member that it completed it; else all run it again in the next view, without the suspects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "Action",
    "Agreement",
    "Completed",
    "Cut",
    "Ended",
    "Entered",
    "Fenced",
    "Message",
    "NewView",
    "Out",
    "Send",
    "Suspects",
    "View",
]

Life = tuple[int, int]  # a rank, and the number of the process that has its place


@dataclass(frozen=True)
class View:
    """The members of a group, from one change of them to the next; `key` is unlike that of any other."""

    number: int
    key: int
    lives: tuple[Life, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """Their ranks, ascending."""
        return tuple(rank for rank, _ in self.lives)

    @classmethod
    def first(cls, lives: Iterable[Life], salt: int = 0) -> View:
        """Return the view that a group begins with."""
        return cls(0, salt, ()).after(lives)

    def after(self, lives: Iterable[Life]) -> View:
        """Return the next one. The same for whoever has the same two."""
        ordered = tuple(sorted(lives))
        text = repr((self.key, self.number, ordered)).encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return View(self.number + 1, key, ordered)


@dataclass(frozen=True)
class Completed:
    """The sender has all that an operation brings it."""

    view: int
    op: int


@dataclass(frozen=True)
class Suspects:
    """Whom the sender suspects in a view, the last operation that ended, and who completed the next one."""

    view: int
    ranks: frozenset[int]
    ended: int
    completed: frozenset[int]


@dataclass(frozen=True)
class NewView:
    """What follows a view: decided. `ended`: the last operation that ended before."""

    before: int
    view: View
    ended: int


@dataclass(frozen=True)
class Out:
    """The receiver is out of the group."""


Message = Completed | Suspects | NewView | Out


@dataclass(frozen=True)
class Send:
    """Send a message to a rank, behind all that was sent to it before."""

    to: int
    message: Message


@dataclass(frozen=True)
class Cut:
    """Take nothing more from a rank."""

    rank: int


@dataclass(frozen=True)
class Ended:
    """An operation ended. `view` is that of its contributors."""

    op: int
    view: View


@dataclass(frozen=True)
class Entered:
    """The group goes on in a view."""

    view: View


@dataclass(frozen=True)
class Fenced:
    """This rank is out of the group."""


Action = Send | Cut | Ended | Entered | Fenced


class Agreement:
    """One rank's side. `complete`, `suspect` and `receive` return what to do, in order."""

    def __init__(self, rank: int, view: View, ended: int = 0, *, awaits: int | None = None) -> None:
        """`awaits`: the number of this process, which waits to be let in by a view that has it."""
        self.rank = rank
        self.view = view
        self.ended = ended
        self.fenced = False
        self.suspects: frozenset[int] = frozenset()
        self._awaits = awaits
        self._grows: tuple[Life, ...] = ()
        self._completed: set[int] = set()  # of the operation after the last one that ended
        self._heard: dict[int, Suspects] = {}

    @property
    def changing(self) -> bool:
        """Whether somebody is suspected and the next view not decided."""
        return bool(self.suspects)

    def incomplete(self) -> set[int]:
        """Return the members that have not said that they completed the operation under way."""
        return set(self.view.members) - self._completed

    def unheard(self) -> set[int]:
        """Return the members that this rank waits for to go to the next view."""
        left = set(self.view.members) - self.suspects
        return {rank for rank in left if rank not in self._heard or self._heard[rank].ranks != self.suspects}

    def complete(self, op: int, grows: Sequence[Life] = ()) -> list[Action]:
        """This rank has all of an operation; `grows`: whom all members let in at its end."""
        if self.fenced or op != self.ended + 1:
            return []
        self._grows = tuple(grows)
        self._completed.add(self.rank)
        return self._to_others(Completed(self.view.key, op)) + self._end_if_complete()

    def suspect(self, ranks: Iterable[int]) -> list[Action]:
        """Take members for lost: their connection ended, or they are too late."""
        found = frozenset(ranks) & frozenset(self.view.members) - self.suspects - {self.rank}
        if self.fenced or not found:
            return []
        self.suspects |= found
        actions: list[Action] = [Cut(rank) for rank in sorted(found)]
        told = Suspects(self.view.key, self.suspects, self.ended, frozenset(self._completed))
        self._heard[self.rank] = told
        return actions + self._to_others(told) + self._decide()

    def receive(self, source: int, message: Message) -> list[Action]:
        """Take what a rank says; nothing of a suspect."""
        if self.fenced or source in self.suspects:
            return []
        if isinstance(message, Out):
            return self._fence()
        if isinstance(message, NewView):
            return self._take_view(message)
        if message.view != self.view.key or source not in self.view.members:
            return []
        if isinstance(message, Completed):
            if message.op == self.ended + 1:
                self._completed.add(source)
            return self._end_if_complete()
        if self.rank in message.ranks:
            return self._fence()
        self._heard[source] = message
        return self.suspect(message.ranks) + self._decide()

    def _end_if_complete(self) -> list[Action]:
        # What this rank has told of is frozen while a view is decided.
        if self.changing or not self._completed.issuperset(self.view.members):
            return []
        actions = self._end()
        if self._grows:
            grown, self._grows = self._grows, ()
            actions += self._enter(self.view.after({*self.view.lives, *grown}), self.view.key)
        return actions

    def _end(self) -> list[Action]:
        self.ended += 1
        self._completed = set()
        self._awaits = None
        return [Ended(self.ended, self.view)]

    def _decide(self) -> list[Action]:
        left = [rank for rank in self.view.members if rank not in self.suspects]
        reports = [self._heard.get(rank) for rank in left]
        if not self.changing or any(one is None or one.ranks != self.suspects for one in reports):
            return []
        said = [one for one in reports if one is not None]
        ended = max(one.ended for one in said)
        known: set[int] = set()
        for one in said:
            if one.ended == ended:
                known |= one.completed
        grows: tuple[Life, ...] = ()
        if known.issuperset(self.view.members):
            ended += 1
            grows = self._grows
        actions = self._end() if self.ended < ended else []
        stay = {life for life in self.view.lives if life[0] in left}
        return actions + self._enter(self.view.after(stay | set(grows)), self.view.key)

    def _take_view(self, message: NewView) -> list[Action]:
        if self._awaits is not None and message.before != self.view.key:
            if (self.rank, self._awaits) not in message.view.lives or message.view.number <= self.view.number:
                return []
            self.ended = message.ended
        elif message.before != self.view.key:
            return []
        elif self.rank not in message.view.members:
            return self._fence()
        actions = self._end() if self.ended < message.ended else []
        return actions + self._enter(message.view, message.before)

    def _enter(self, view: View, before: int) -> list[Action]:
        self.view = view
        suspects, self.suspects = self.suspects, frozenset()
        self._grows = ()
        self._completed, self._heard = set(), {}
        actions: list[Action] = [Entered(view)]
        # Told before anything of the new view is, so whoever hears from this rank knows the view.
        actions += self._to_others(NewView(before, view, self.ended))
        # Whom this rank suspects for itself may be in a view that others decided.
        return actions + self.suspect(suspects)

    def _fence(self) -> list[Action]:
        self.fenced = True
        return [Fenced()]

    def _to_others(self, message: Message) -> list[Action]:
        return [
            Send(rank, message)
            for rank in self.view.members
            if rank != self.rank and rank not in self.suspects
        ]
