"""Carries out the moves of a plan for one rank, while it goes on serving by the placement before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mooncake_ep._errors import PlacementError
from mooncake_ep.eplb import Plan
from mooncake_ep.repair.copying import Copy, CopyJob
from mooncake_ep.repair.sources import rank_of_slot, sources_of
from mooncake_ep.repair.weights import Offer, SlotWeights
from mooncake_transfer import Region

__all__ = ["Repair", "start_repair"]


class Repair(CopyJob):
    """The moves of one rank under way. Empty slots are filled in place; the others in `commit`."""

    def __init__(
        self,
        weights: SlotWeights,
        copies: Sequence[Copy],
        staging: Region | None,
        *,
        bytes_per_s: float | None,
        deadline_s: float,
    ) -> None:
        self._weights, self._staging = weights, staging
        super().__init__(weights.engine, weights.rank, copies, bytes_per_s=bytes_per_s, deadline_s=deadline_s)

    def commit(self, slots_before: int) -> None:
        """Put what was staged into its slots. Waits for the copies; `slots_before`: of the ranks before us.

        Call it when `wait` has returned on every rank, between two steps of the model: until then peers read
        from these slots, and from now on they hold the experts of the new placement. Raises as `wait` does,
        with nothing changed.
        """
        self.wait()
        if self._staging is None:
            return
        staged = torch.frombuffer(self._staging.view(), dtype=torch.uint8)
        for copy in self._copies:
            if copy.target is self._staging:
                place = self._weights.slot(copy.layer, copy.slot - slots_before)
                place.copy_(staged[copy.offset : copy.offset + copy.nbytes])
        del staged
        self.discard()

    def discard(self) -> None:
        """End it, and give the memory of what was not committed back. Safe to call twice."""
        self.cancel()
        if self._staging is not None:
            self._staging.close()
            self._staging = None


def start_repair(
    weights: SlotWeights,
    plan: Plan,
    before: torch.Tensor,
    slots_of_rank: Sequence[int],
    offers: Mapping[int, Offer],
    *,
    bytes_per_s: float | None = None,
    deadline_s: float = 60.0,
) -> Repair:
    """Begin to read what `plan.moves` brings to our slots; every rank that gets something calls it.

    `before` int64 [layers, slots] is the placement that the plan started from, -1 in slots that serve nobody
    (of ranks that are new or gone). `offers`: of every rank that can be read, by rank; those of dead ranks
    are left out. Each expert is read from the slot that the plan names; if that fails, from another slot or
    from a host copy. Raises PlacementError for a plan of other slots than `weights` has; what goes wrong
    later, `Repair.wait` raises.
    """
    if slots_of_rank[weights.rank] != weights.slots or before.shape[1] != sum(slots_of_rank):
        raise PlacementError(
            f"rank {weights.rank} has {weights.slots} slots of {before.shape[1]}, and slots_of_rank is "
            f"{list(slots_of_rank)}"
        )
    mine = [
        (layer, expert, source, slot)
        for layer, expert, source, slot in plan.moves.tolist()
        if rank_of_slot(slots_of_rank, slot)[0] == weights.rank
    ]
    staged = [move for move in mine if int(before[move[0], move[3]]) >= 0]
    nbytes = sum(weights.slot_bytes[layer] for layer, _, _, _ in staged)
    staging = weights.engine.allocate(nbytes, name="experts on their way") if nbytes else None
    copies, end = [], 0
    for move in mine:
        layer, expert, source, slot = move
        length = weights.slot_bytes[layer]
        target, offset = weights.regions[layer], rank_of_slot(slots_of_rank, slot)[1] * length
        if staging is not None and move in staged:
            target, offset, end = staging, end, end + length
        found = tuple(sources_of(layer, expert, source, before, slots_of_rank, offers))
        copies.append(Copy(layer, expert, slot, length, target, offset, found))
    return Repair(weights, copies, staging, bytes_per_s=bytes_per_s, deadline_s=deadline_s)
