"""How ranks come into a group between hosts and are taken out of it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from mooncake_ep.pg.wire.agreement import View
from mooncake_ep.pg.wire.collectives import sign
from mooncake_ep.pg.wire.faults import Point
from mooncake_ep.pg.wire.frames import Kind, Lane, pack
from mooncake_ep.pg.wire.greeting import Address, address_of
from mooncake_ep.pg.wire.group import Attempt, Group, Life
from mooncake_ep.pg.wire.neighbours import Lent
from mooncake_ep.pg.wire.outcome import Code, Stop

__all__ = ["Members", "new_life"]

_FOUND, _ADMIT, _JOIN, _EXPEL = range(1, 5)
_LIFE_BYTES = 8
_DIAL_AGAIN_S = 0.1


def new_life() -> int:
    """Return a number that no other process has, nor this one before."""
    return secrets.randbits(62) | 1


class Members:
    """Changes of the members, and where processes are reached."""

    def __init__(self, group: Group, life: int) -> None:
        self._group = group
        self.life = life
        self.book: dict[int, Address] = {}
        self.joined = False

    # Where processes are.

    def tell(self, rank: int) -> None:
        """Tell a process of all that this one knows of."""
        self.book[self._group.rank] = self._group.links.address()
        told = {str(one): list(address) for one, address in self.book.items()}
        self._group.links.send(rank, Lane.CONTROL, *pack(Kind.BOOK, told))

    def learn(self, source: int, payload: bytes) -> None:
        """Take over what another process knows of others; guests are told of each other."""
        news = False
        for text, told in json.loads(payload).items():
            rank, address = int(text), address_of(told)
            known = self.book.get(rank)
            if known == address or rank == self._group.rank:
                continue
            if rank == source or known is None or self._group.links.life(rank) != known.life:
                self.book[rank] = address
                news = True
        if news:
            for rank in self._group.links.ranks():
                if rank not in self._group.agreement.view.members:
                    self.tell(rank)

    def lent_by(self, rank: int) -> Lent | None:
        """Return what a member lends to its host; None when its address is not that of the member."""
        life = dict(self._group.agreement.view.lives).get(rank)
        if rank == self._group.rank:
            return self._group.links.address().lent
        address = self.book.get(rank)
        return address.lent if address is not None and address.life == life else None

    def _connect(self, ranks: Sequence[int], deadline: float) -> None:
        for rank in ranks:
            with self._group.lock:
                address = self.book[rank]
            self._group.links.connect(rank, address, deadline)

    # Members.

    def found(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """The first members, all in the book, connect and have their first operation."""
        group = self._group
        lives = [(rank, self.book[rank].life) for rank in ranks]
        with group.lock:
            group.restart(View.first(lives), None)  # before anybody can say anything of it
        self._connect([rank for rank in ranks if rank < group.rank], deadline)
        with group.lock:
            while not all(group.links.life(rank) == life for rank, life in lives if rank != group.rank):
                if time.monotonic() > deadline:
                    absent = [rank for rank, life in lives if group.links.life(rank) != life]
                    raise Stop(Code.TIMEOUT, f"no connection with the ranks {absent} in time")
                group.changed.wait(_DIAL_AGAIN_S)
        self.joined = True
        return list(group.run(sign(_FOUND), lambda _: None, 0, deadline).members)

    def waits(self, rank: int) -> bool:
        """Whether somebody waits to be let in as a rank."""
        group = self._group
        with group.lock:
            return rank not in group.agreement.view.members and group.links.life(rank) != 0

    def admit(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Let in those whom every member sees waiting; returns them."""
        group = self._group
        offered = [group.links.life(rank) if self.waits(rank) else 0 for rank in ranks]
        offer = b"".join(life.to_bytes(_LIFE_BYTES, "little") for life in offered)
        agreed: list[Life] = []

        def attempt(current: Attempt) -> list[Life]:
            said = {bytes(group.opening(current, rank)) for rank in current.others} | {offer}
            columns = zip(*(_lives_of(one) for one in said), strict=True)
            agreed[:] = [
                (rank, lives[0])
                for rank, lives in zip(ranks, columns, strict=True)
                if lives[0] and len(set(lives)) == 1 and rank not in current.view.members
            ]
            return agreed

        group.run(sign(_ADMIT, *ranks), attempt, 0, deadline, lambda _: offer)
        if agreed:
            group.run(sign(_JOIN), lambda _: None, 0, deadline)
        return [rank for rank, _ in agreed]

    def expel(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Take ranks out, whether they answer or not."""
        group = self._group
        if group.rank in ranks:
            self.leave()
            group.check_in()
        with group.lock:
            group.do(group.agreement.suspect(ranks))
        return list(group.run(sign(_EXPEL), lambda _: None, 0, deadline).members)

    def leave(self) -> None:
        """Take this rank out; the others notice at once."""
        group = self._group
        with group.lock:
            group.agreement.fenced = True
            for rank in group.links.ranks():
                group.links.cut(rank)
            group.changed.notify_all()

    def join(self, deadline: float) -> list[int]:
        """Wait to be let in. Stop(TIMEOUT) when nobody does."""
        group = self._group
        self.leave()
        with group.lock:
            self.life = new_life()
            group.links.renew(self.life)
            group.restart(View(0, secrets.randbits(63), ((group.rank, self.life),)), self.life)
        while len(group.agreement.view.members) < 2:
            group.check_in()
            if time.monotonic() > deadline:
                self.leave()
                raise Stop(
                    Code.TIMEOUT,
                    f"no member let rank {group.rank} in; every member has to call "
                    f"recover_ranks([{group.rank}])",
                )
            with group.lock:
                unknown = [
                    rank
                    for rank, address in self.book.items()
                    if rank != group.rank and group.links.life(rank) != address.life
                ]
            self._connect(unknown, min(deadline, time.monotonic() + 1.0))
            with group.lock:
                if len(group.agreement.view.members) < 2:
                    group.changed.wait(_DIAL_AGAIN_S)
        group.faults.at(Point.BEFORE_JOIN)
        self.joined = True
        members = group.run(sign(_JOIN), lambda _: None, 0, deadline).members
        if len(members) < 2:
            self.leave()
            group.check_in()
        return list(members)


def _lives_of(offer: bytes) -> list[int]:
    return [
        int.from_bytes(offer[begin : begin + _LIFE_BYTES], "little")
        for begin in range(0, len(offer), _LIFE_BYTES)
    ]
