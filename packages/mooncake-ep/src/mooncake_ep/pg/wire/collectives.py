"""The collectives of a group between hosts, as attempts that `Group.run` repeats until one ends."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_ep.pg.wire.faults import Point
from mooncake_ep.pg.wire.group import Attempt, Group
from mooncake_ep.pg.wire.hierarchy import Hierarchy
from mooncake_ep.pg.wire.links import LARGEST
from mooncake_ep.pg.wire.memory import Scratch, copy_into, parts_of, tensor_of, view_at
from mooncake_ep.pg.wire.outcome import Code, Stop
from mooncake_ep.pg.wire.reduction import Reduction, reduce_into
from mooncake_ep.pg.wire.shares import shares_of

__all__ = ["INLINE", "Collectives", "Span"]

Span = tuple[int, int]  # address and bytes
INLINE = 16 << 10  # bytes that go with the announcement of an operation
_BARRIER, _ALL_REDUCE, _REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _GATHER, _BROADCAST, _SCATTER, _ALL_TO_ALL = (
    range(16, 25)
)
_RESULTS = 1 << 20  # slots from here on are of results


def sign(kind: int, *values: int) -> int:
    """Return what an operation is, in one number: ranks compare it."""
    number = kind
    for value in values:
        number = (number * 0x9E3779B97F4A7C15 + value + 1) % 2**64
    return number


def missing_root(root: int, what: str) -> Stop:
    """Return the end of an operation whose root is gone."""
    return Stop(
        Code.RANK_FAILED, f"rank {root}, the root of a {what}, is gone; choose another root that has the data"
    )


class Collectives:
    """Each returns who contributed. What was to come from anybody else is filled with zeros."""

    def __init__(self, group: Group, capacity: int, hierarchy: Hierarchy) -> None:
        self._group = group
        self._hierarchy = hierarchy
        self._capacity = capacity
        self._scratch = Scratch()

    def barrier(self, deadline: float) -> list[int]:
        """Wait for all members."""
        return self._ended(self._group.run(sign(_BARRIER), lambda _: None, 0, deadline).members)

    def all_reduce(self, reduction: Reduction, data: int, count: int, deadline: float) -> list[int]:
        """Reduce in place."""
        nbytes = count * reduction.itemsize
        mine = view_at(data, nbytes)
        short = nbytes <= INLINE
        kept = mine  # where the input is, also when an attempt has written to `mine`
        sources, whole = [mine], False  # what the result is made of; `whole`: it is the first of them

        def attempt(current: Attempt) -> None:
            nonlocal kept, sources, whole
            whole = False
            others = current.others
            by_rank = {self._group.rank: kept}
            hosts = None if short else self._hierarchy.hosts(current, reduction, nbytes)
            if hosts is not None:
                kept = self._hierarchy.keep(mine) if kept is mine else kept
                sources, whole = [mine], True
                self._hierarchy.reduce(current, hosts, reduction, mine, count)
            elif short:
                by_rank |= {rank: self._group.opening(current, rank) for rank in others}
                sources = [by_rank[rank] for rank in current.view.members]
            elif len(others) <= 1:
                came = dict(zip(others, self._scratch.split("in", [nbytes] * len(others)), strict=True))
                self._exchange(current, dict.fromkeys(others, kept), came)
                by_rank |= came
                sources = [by_rank[rank] for rank in current.view.members]
            else:
                sources, whole = [self._scratch.take("out", nbytes)], True
                self._reduce_shares(current, reduction, kept, sources[0], count)

        view = self._group.run(
            sign(_ALL_REDUCE, reduction.number, nbytes),
            attempt,
            nbytes,
            deadline,
            lambda _: mine if short else b"",
        )
        if whole:
            copy_into(mine, sources[0])
        else:
            self._reduce(reduction, mine, sources)
        return self._ended(view.members)

    def _reduce(self, reduction: Reduction, out: memoryview, sources: Sequence[memoryview]) -> None:
        if len(out):
            dtype = reduction.dtype
            reduce_into(reduction, tensor_of(out, dtype), [tensor_of(source, dtype) for source in sources])

    def _reduce_shares(
        self, current: Attempt, reduction: Reduction, mine: memoryview, out: memoryview, count: int
    ) -> None:
        """Each member reduces a share of the elements and gives the result to all, piece by piece."""
        group, members = self._group, current.view.members
        shares = dict(zip(members, shares_of(count, len(members), reduction.itemsize), strict=True))
        begin, end = shares[group.rank]
        came = self._scratch.split("in", [end - begin] * len(current.others))
        theirs = dict(zip(current.others, (parts_of(one, LARGEST) for one in came), strict=True))
        wanted = set()
        for rank in current.others:
            for slot, part in enumerate(theirs[rank]):
                group.post(current, rank, slot, part)
            results = parts_of(out[slice(*shares[rank])], LARGEST)
            for slot, part in enumerate(results, _RESULTS):
                group.post(current, rank, slot, part)
                wanted.add((rank, slot))
        sent = {rank: parts_of(mine[slice(*shares[rank])], LARGEST) for rank in current.others}
        for slot in range(max(len(parts) for parts in sent.values())):
            for rank in current.others:
                if slot < len(sent[rank]):
                    group.send(current, rank, slot, sent[rank][slot])
        own, results = parts_of(mine[begin:end], LARGEST), parts_of(out[begin:end], LARGEST)
        for slot, result in enumerate(results):
            group.receive(current, {(rank, slot) for rank in current.others})
            sources = [own[slot] if rank == group.rank else theirs[rank][slot] for rank in members]
            self._reduce(reduction, result, sources)
            if slot == 0:
                group.faults.at(Point.BEFORE_RESULT)
            for rank in current.others:
                group.send(current, rank, _RESULTS + slot, result)
        group.receive(current, wanted)

    def reduce_to(self, root: int, reduction: Reduction, data: int, count: int, deadline: float) -> list[int]:
        """Reduce to the root, in place; the others' data stays."""
        self._check_root(root)
        nbytes = count * reduction.itemsize
        mine = view_at(data, nbytes)
        here = root == self._group.rank
        out = self._scratch.take("out", nbytes if here else 0)

        def attempt(current: Attempt) -> None:
            others = current.others
            if not here:
                self._exchange(current, {root: mine}, {})
                return
            came = dict(zip(others, self._scratch.split("in", [nbytes] * len(others)), strict=True))
            self._exchange(current, {}, came)
            self._reduce(reduction, out, [came.get(rank, mine) for rank in current.view.members])

        view = self._group.run(sign(_REDUCE, reduction.number, nbytes, root), attempt, nbytes, deadline)
        if here:
            copy_into(mine, out)
        return self._ended(view.members)

    def reduce_scatter(
        self, reduction: Reduction, out: int, inputs: Sequence[Span], deadline: float
    ) -> list[int]:
        """Reduce `inputs[rank]` to each rank."""
        parts = [view_at(*span) for span in inputs]
        total, own = sum(len(part) for part in parts), parts[self._group.rank]
        result = self._scratch.take("out", len(own))

        def attempt(current: Attempt) -> None:
            others = current.others
            came = dict(zip(others, self._scratch.split("in", [len(own)] * len(others)), strict=True))
            self._exchange(current, {rank: parts[rank] for rank in others if rank < len(parts)}, came)
            self._reduce(reduction, result, [came.get(rank, own) for rank in current.view.members])

        view = self._group.run(sign(_REDUCE_SCATTER, reduction.number, total), attempt, total, deadline)
        copy_into(view_at(out, len(own)), result)
        return self._ended(view.members)

    def all_gather(self, outs: Sequence[Span], data: int, nbytes: int, deadline: float) -> list[int]:
        """Collect from all."""
        mine, places = view_at(data, nbytes), [view_at(*span) for span in outs]
        short = nbytes <= INLINE

        def attempt(current: Attempt) -> None:
            if not short:
                others = [rank for rank in current.others if rank < len(places)]
                self._exchange(
                    current, dict.fromkeys(current.others, mine), {one: places[one] for one in others}
                )
                return
            for rank in current.others:
                places[rank][:] = self._group.opening(current, rank)

        view = self._group.run(
            sign(_ALL_GATHER, nbytes), attempt, nbytes * len(outs), deadline, lambda _: mine if short else b""
        )
        return self._gathered(view.members, places, mine)

    def gather(self, root: int, outs: Sequence[Span], data: int, nbytes: int, deadline: float) -> list[int]:
        """Collect at the root."""
        self._check_root(root)
        mine, places = view_at(data, nbytes), [view_at(*span) for span in outs]

        def attempt(current: Attempt) -> None:
            if root == self._group.rank:
                self._exchange(current, {}, {one: places[one] for one in current.others if one < len(places)})
            else:
                self._exchange(current, {root: mine}, {})

        view = self._group.run(sign(_GATHER, nbytes, root), attempt, nbytes * self._capacity, deadline)
        return self._gathered(view.members, places if root == self._group.rank else [], mine)

    def _gathered(self, members: Sequence[int], places: Sequence[memoryview], mine: memoryview) -> list[int]:
        for rank, place in enumerate(places):
            if rank == self._group.rank:
                copy_into(place, mine)
            elif rank not in members:
                place[:] = bytes(len(place))
        return self._ended(members)

    def broadcast(self, root: int, data: int, nbytes: int, deadline: float) -> list[int]:
        """Copy the root's data to all. Stop(RANK_FAILED) when the root is gone."""
        self._check_root(root)
        mine, here = view_at(data, nbytes), root == self._group.rank
        short = here and nbytes <= INLINE

        def attempt(current: Attempt) -> None:
            if root not in current.view.members:
                return
            if here and not short:
                self._exchange(current, dict.fromkeys(current.others, mine), {})
            elif not here and nbytes <= INLINE:
                mine[:] = self._group.opening(current, root)
            elif not here:
                self._exchange(current, {}, {root: mine})

        signature = sign(_BROADCAST, nbytes, root)
        view = self._group.run(signature, attempt, nbytes, deadline, lambda _: mine if short else b"")
        if root not in view.members:
            raise missing_root(root, "broadcast")
        return self._ended(view.members)

    def scatter(self, root: int, out: int, nbytes: int, inputs: Sequence[Span], deadline: float) -> list[int]:
        """Give each rank one of the root's inputs. Stop(RANK_FAILED) when the root is gone."""
        self._check_root(root)
        place, parts, here = (
            view_at(out, nbytes),
            [view_at(*span) for span in inputs],
            root == self._group.rank,
        )

        def attempt(current: Attempt) -> None:
            if root not in current.view.members:
                return
            if here:
                self._exchange(current, {one: parts[one] for one in current.others if one < len(parts)}, {})
            else:
                self._exchange(current, {}, {root: place})

        view = self._group.run(sign(_SCATTER, nbytes, root), attempt, nbytes, deadline)
        if root not in view.members:
            raise missing_root(root, "scatter")
        if here:
            copy_into(place, parts[root])
        return self._ended(view.members)

    def all_to_all(self, outs: Sequence[Span], inputs: Sequence[Span], deadline: float) -> list[int]:
        """Give `inputs[rank]` to each rank; only the sender knows how many bytes there are."""
        rank = self._group.rank
        places, parts = [view_at(*span) for span in outs], [view_at(*span) for span in inputs]
        sizes = [len(part) for part in parts]
        wrong: list[str] = []

        def opening(to: int) -> bytes:
            return (sizes[to] if to < len(sizes) else 0).to_bytes(8, "little")

        def attempt(current: Attempt) -> None:
            wrong.clear()
            came = {}
            for other in current.others:
                comes = int.from_bytes(self._group.opening(current, other), "little")
                expected = len(places[other]) if other < len(places) else 0
                came[other] = places[other] if other < len(places) else memoryview(bytearray())
                if comes != expected:
                    wrong.append(f"rank {other} sends {comes} bytes to rank {rank}, which expects {expected}")
                    came[other] = self._scratch.take("unfit", comes)
            sent = {other: parts[other] for other in current.others if other < len(parts)}
            self._exchange(current, sent, came)

        signature = sign(_ALL_TO_ALL, len(inputs))
        view = self._group.run(signature, attempt, sum(sizes), deadline, opening)
        if wrong:
            raise Stop(Code.MISMATCH, wrong[0])
        if len(places[rank]) != sizes[rank]:
            raise Stop(
                Code.MISMATCH,
                f"rank {rank} sends {sizes[rank]} bytes to itself, and expects {len(places[rank])}",
            )
        return self._gathered(view.members, places, parts[rank])

    def _exchange(self, current: Attempt, sent: dict[int, memoryview], came: dict[int, memoryview]) -> None:
        """Send to some members and receive from some, all of it."""
        group, wanted = self._group, set()
        members = current.view.members
        for rank, memory in came.items():
            for slot, part in enumerate(parts_of(memory, LARGEST)):
                group.post(current, rank, slot, part)
                wanted.add((rank, slot))
        pieces = {rank: parts_of(memory, LARGEST) for rank, memory in sent.items() if rank in members}
        for slot in range(max((len(parts) for parts in pieces.values()), default=0)):
            for rank, parts in pieces.items():
                if slot < len(parts):
                    group.send(current, rank, slot, parts[slot])
        group.receive(current, wanted)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._capacity:
            raise Stop(Code.INVALID, f"root is rank {root}; ranks go from 0 to {self._capacity - 1}")

    def _ended(self, members: Sequence[int]) -> list[int]:
        self._group.check_in()
        self._group.faults.at(Point.BEFORE_RETURN)
        return list(members)
