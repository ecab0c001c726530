"""The agreement between hosts under random deaths, delays, false alarms and arrivals."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import pytest

from mooncake_ep.pg.wire.agreement import (
    Agreement,
    Completed,
    Cut,
    Ended,
    Entered,
    Fenced,
    NewView,
    Out,
    Send,
    Suspects,
    View,
)

SCHEDULES = 500
OPERATIONS = 4
STEPS = 20_000


class Rank:
    """A rank that runs operations as an engine does: it gives its part to all, and waits for theirs."""

    def __init__(self, world: World, number: int, view: View, ended: int, awaits: int | None = None) -> None:
        self.world, self.number = world, number
        self.side = Agreement(number, view, ended, awaits=awaits)
        self.parts: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.given: set[tuple[int, int]] = set()
        self.ended: dict[int, tuple[int, ...]] = {}
        self.completed: set[tuple[int, int]] = set()

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.world.post(self.number, action.to, action.message)
            elif isinstance(action, Cut):
                self.world.post(self.number, action.rank, Out())
                self.world.cut(self.number, action.rank)
            elif isinstance(action, Ended):
                key = (action.view.key, action.op)
                assert key in self.completed, "it ended with parts of another operation, or without some"
                assert action.op not in self.ended
                self.ended[action.op] = action.view.members
            elif isinstance(action, Fenced):
                for other in self.world.ranks:
                    self.world.lines[self.number, other].append(None)  # it ends its connections
            else:
                assert isinstance(action, Entered)
        self.go_on()

    def go_on(self) -> None:
        """Give this rank's part of the operation that comes next, once per view, and see what is there."""
        side = self.side
        key = (side.view.key, side.ended + 1)
        if side.fenced or side.ended >= OPERATIONS or self.number not in side.view.members:
            return
        if key not in self.given and not side.changing:
            self.given.add(key)
            self.parts[key].add(self.number)
            for rank in side.view.members:
                if rank != self.number:
                    self.world.post(self.number, rank, key)
        if key in self.given and key not in self.completed and self.parts[key] >= set(side.view.members):
            self.completed.add(key)
            grows = self.world.guests if side.ended + 1 == self.world.grows_at else ()
            self.act(side.complete(side.ended + 1, grows))

    def receive(self, source: int, message: Any) -> None:
        if isinstance(message, tuple):
            self.parts[message].add(source)
            self.go_on()
        else:
            self.act(self.side.receive(source, message))


class World:
    """Ranks and what is on its way between each two of them, in order; `chance` decides what comes next."""

    def __init__(self, seed: int, ranks: int, *, deaths: int, alarms: int, guest: bool) -> None:
        self.chance = random.Random(seed)
        lives = [(rank, 100 + rank) for rank in range(ranks)]
        self.guests = ((ranks, 1),) if guest else ()
        self.grows_at = self.chance.randrange(1, OPERATIONS) if guest else 0
        self.lines: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.dead: set[int] = set()
        self.deaths, self.alarms = deaths, alarms
        self.ranks = {rank: Rank(self, rank, View.first(lives), 0) for rank, _ in lives}
        for rank, life in self.guests:
            self.ranks[rank] = Rank(self, rank, View(0, 7, ((rank, life),)), OPERATIONS, awaits=life)

    def post(self, source: int, to: int, message: Any) -> None:
        if source not in self.dead:
            self.lines[source, to].append(message)
            if self.chance.random() < 0.1 and not isinstance(message, tuple):
                self.lines[source, to].append(message)  # told twice

    def cut(self, rank: int, other: int) -> None:
        self.lines[other, rank].clear()
        self.lines[rank, other].append(None)  # the other end sees that the line ended

    def kill(self, rank: int) -> None:
        self.dead.add(rank)
        for other in self.ranks:
            line = self.lines[rank, other]
            for _ in range(self.chance.randrange(len(line) + 1)):
                line.pop()  # had not left yet
            line.append(None)

    def run(self) -> None:
        for rank in list(self.ranks.values()):
            rank.go_on()
        for _ in range(STEPS):
            busy = [pair for pair, line in self.lines.items() if line and pair[1] not in self.dead]
            if not busy:
                return
            self.hurt()
            source, to = self.chance.choice(busy)
            if not self.lines[source, to] or to in self.dead:
                continue
            message = self.lines[source, to].popleft()
            rank = self.ranks[to]
            if message is None:
                rank.act(rank.side.suspect([source]))
            else:
                rank.receive(source, message)
        pytest.fail("no end")

    def hurt(self) -> None:
        living = [rank for rank in self.ranks if rank not in self.dead]
        if self.deaths and len(living) > 1 and self.chance.random() < 0.03:
            self.deaths -= 1
            self.kill(self.chance.choice(living))
        elif self.alarms and len(living) > 1 and self.chance.random() < 0.03:
            self.alarms -= 1
            one, other = self.chance.sample(living, 2)
            self.ranks[one].act(self.ranks[one].side.suspect([other]))

    def survivors(self) -> list[Rank]:
        return [one for number, one in self.ranks.items() if number not in self.dead and not one.side.fenced]


def check_equal_histories(world: World, seed: int) -> None:
    """Ranks that are in one view at the end say the same of every operation that both took part in."""
    for one in world.survivors():
        for other in world.survivors():
            if one.side.view.key != other.side.view.key:
                continue
            for op in one.ended.keys() & other.ended.keys():
                assert one.ended[op] == other.ended[op], f"seed {seed}, operation {op}"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_survivors_of_deaths_agree_on_every_operation_and_end_them_all(ranks: int) -> None:
    for seed in range(SCHEDULES):
        world = World(seed, ranks, deaths=seed % ranks, alarms=0, guest=False)
        world.run()
        left = world.survivors()
        assert {one.number for one in left} == set(world.ranks) - world.dead, (
            f"seed {seed}: somebody was fenced"
        )
        for one in left:
            assert sorted(one.ended) == list(range(1, OPERATIONS + 1)), f"seed {seed}: rank {one.number}"
            assert not one.side.changing
        assert len({one.side.view.key for one in left if set(one.side.view.members) == set(left)}) <= 1
        check_equal_histories(world, seed)


def test_false_alarms_fence_ranks_and_never_make_two_of_one_view_differ() -> None:
    fenced = 0
    for seed in range(2 * SCHEDULES):
        world = World(seed, 4, deaths=seed % 3, alarms=1 + seed % 2, guest=False)
        world.run()
        check_equal_histories(world, seed)
        for one in world.survivors():
            assert sorted(one.ended) == list(range(1, OPERATIONS + 1)), f"seed {seed}: rank {one.number}"
        fenced += sum(one.side.fenced for one in world.ranks.values())
    assert fenced > SCHEDULES


def test_a_guest_is_in_for_all_or_for_none_also_when_ranks_die_meanwhile() -> None:
    entered = 0
    for seed in range(SCHEDULES):
        world = World(seed, 3, deaths=seed % 3, alarms=0, guest=True)
        world.run()
        check_equal_histories(world, seed)
        guest = world.ranks[3]
        members = {3 in one.side.view.members for one in world.survivors() if one.number != 3}
        if 3 not in world.dead and guest.side.view.number > 0:
            assert members <= {True}, f"seed {seed}"
            assert sorted(guest.ended) == list(range(world.grows_at + 1, OPERATIONS + 1)), f"seed {seed}"
            entered += 1
    assert entered > SCHEDULES // 3


def test_who_asks_late_gets_the_decision_that_was_made() -> None:
    view = View.first([(0, 1), (1, 1), (2, 1)])
    late = Agreement(0, view, 0)
    late.complete(1)
    following = view.after([(0, 1), (1, 1)])
    actions = late.receive(1, NewView(view.key, following, 1))
    assert actions[:2] == [Ended(1, view), Entered(following)]
    assert late.receive(2, Completed(view.key, 1)) == []
    assert late.receive(1, Suspects(view.key, frozenset([2]), 1, frozenset())) == [], "of the view before"
