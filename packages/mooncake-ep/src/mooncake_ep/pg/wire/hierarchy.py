"""All-reduce in two levels: ranks of a host through memory that they lend each other, hosts by connections.

Each rank of a host has a share of the elements. It reduces the share over the ranks of its host, exchanges
what came of it with the ranks that have the same share on other hosts, and lends the result to its host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mooncake_ep.pg.wire.faults import Point
from mooncake_ep.pg.wire.group import Attempt, Group
from mooncake_ep.pg.wire.links import LARGEST
from mooncake_ep.pg.wire.memory import Scratch, copy_into, parts_of, tensor_of
from mooncake_ep.pg.wire.neighbours import HALF_BYTES, Lent, Neighbours, Outbox
from mooncake_ep.pg.wire.reduction import Reduction, reduce_into
from mooncake_ep.pg.wire.shares import shares_of

__all__ = ["Hierarchy"]

_READY, _REDUCED = 1 << 30, (1 << 30) + 1  # slots that say: my input, my result is in the outbox


class Hierarchy:
    """The second level of a group's all-reduces, where its ranks are spread evenly over hosts."""

    def __init__(self, group: Group, outbox: Outbox, lent_by: Callable[[int], Lent | None]) -> None:
        self._group, self._outbox, self._lent_by = group, outbox, lent_by
        self._neighbours = Neighbours()
        self._scratch = Scratch()

    def hosts(self, current: Attempt, reduction: Reduction, nbytes: int) -> list[list[int]] | None:
        """Return the ranks of each host; None where that is no help, or there are not as many on each.

        Nor is it for 16-bit floats, whose sums would be rounded on each host.
        """
        if reduction.wide is not reduction.dtype or nbytes > HALF_BYTES:
            return None
        by_host: dict[str, list[int]] = {}
        for rank in current.view.members:
            lent = self._lent_by(rank)
            if lent is None:
                return None
            by_host.setdefault(lent.host, []).append(rank)
        sizes = {len(ranks) for ranks in by_host.values()}
        return None if sizes == {1} or len(sizes) > 1 else list(by_host.values())

    def keep(self, mine: memoryview) -> memoryview:
        """Lend the input; returns it. Then the memory that it was in can take the result."""
        kept = self._outbox.inputs(len(mine))
        copy_into(kept, mine)
        return kept

    def reduce(
        self,
        current: Attempt,
        hosts: Sequence[Sequence[int]],
        reduction: Reduction,
        data: memoryview,
        count: int,
    ) -> None:
        """Run one attempt; the input is what `keep` was given."""
        group = self._group
        here = next(ranks for ranks in hosts if group.rank in ranks)
        place = here.index(group.rank)
        begin, end = shares_of(count, len(here), reduction.itemsize)[place]
        partners = [ranks[place] for ranks in hosts if group.rank not in ranks]
        came = self._scratch.split("came", [end - begin] * len(partners))
        theirs = dict(zip(partners, (parts_of(one, LARGEST) for one in came), strict=True))
        for rank, parts in theirs.items():
            for slot, part in enumerate(parts):
                group.post(current, rank, slot, part)
        self._say(current, here, _READY)
        sources = {rank: self._inputs(rank, len(data)) for rank in here}
        mine = parts_of(self._scratch.take("host", end - begin), LARGEST)
        for slot, part in enumerate(mine):
            at = slice(begin + slot * LARGEST, begin + slot * LARGEST + len(part))
            self._reduce(reduction.within(), part, [sources[rank][at] for rank in here])
            for rank in partners:
                group.send(current, rank, slot, part)
        group.faults.at(Point.BEFORE_RESULT)
        results = parts_of(self._outbox.results(len(data))[begin:end], LARGEST)
        order = [ranks[place] for ranks in hosts]
        for slot, result in enumerate(results):
            group.receive(current, {(rank, slot) for rank in partners})
            parts = [mine[slot] if rank == group.rank else theirs[rank][slot] for rank in order]
            self._reduce(reduction.across(), result, parts)
            reduction.finish(tensor_of(result, reduction.dtype), len(current.view.members))
        self._say(current, here, _REDUCED)
        for rank, share in zip(here, shares_of(count, len(here), reduction.itemsize), strict=True):
            copy_into(data[slice(*share)], self._results(rank, len(data))[slice(*share)])

    def _say(self, current: Attempt, here: Sequence[int], slot: int) -> None:
        """Tell the ranks of this host how far this one is, and wait until they are."""
        others = [rank for rank in here if rank != self._group.rank]
        for rank in others:
            self._group.post(current, rank, slot, memoryview(bytearray()))
        for rank in others:
            self._group.send(current, rank, slot, memoryview(bytearray()))
        self._group.receive(current, {(rank, slot) for rank in others})

    def _inputs(self, rank: int, nbytes: int) -> memoryview:
        if rank == self._group.rank:
            return self._outbox.inputs(nbytes)
        return self._neighbours.inputs(self._found(rank), nbytes)

    def _results(self, rank: int, nbytes: int) -> memoryview:
        if rank == self._group.rank:
            return self._outbox.results(nbytes)
        return self._neighbours.results(self._found(rank), nbytes)

    def _found(self, rank: int) -> Lent:
        lent = self._lent_by(rank)
        assert lent is not None
        return lent

    def _reduce(self, reduction: Reduction, out: memoryview, sources: Sequence[memoryview]) -> None:
        tensors: list[torch.Tensor] = [tensor_of(source, reduction.dtype) for source in sources]
        reduce_into(reduction, tensor_of(out, reduction.dtype), tensors)
