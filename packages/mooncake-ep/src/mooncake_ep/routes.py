"""From the experts that a model chose to the slots that serve them, past ranks that are gone.

Pure: a table knows which slots hold an expert and which ranks live. When a rank dies, `without` gives a table
that sends its tokens to the other replicas, from the next dispatch on and before anything is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mooncake_ep._errors import PlacementError, RoutingError
from mooncake_ep.layout import ExpertOwners

__all__ = ["RouteTable"]


@dataclass(frozen=True, eq=False)
class RouteTable:
    """Which slots serve an expert of one layer.

    `expert_of_slot` int64 [slots]: the logical expert of each slot, -1 for none; slots of a rank follow those
    of the rank before (a row of `eplb.Plan.physical_to_logical`). `slots_of_rank` [ranks]: how many each has.
    `active` [ranks]: who lives. Raises PlacementError when these do not fit together.
    """

    expert_of_slot: torch.Tensor
    slots_of_rank: tuple[int, ...]
    num_experts: int
    active: tuple[bool, ...]

    def __post_init__(self) -> None:
        slots, ranks = sum(self.slots_of_rank), len(self.slots_of_rank)
        if tuple(self.expert_of_slot.shape) != (slots,) or len(self.active) != ranks:
            raise PlacementError(
                f"expert_of_slot {tuple(self.expert_of_slot.shape)} and active, {len(self.active)} entries, "
                f"must be of {slots} slots and {ranks} ranks"
            )
        if slots and int(self.expert_of_slot.max()) >= self.num_experts:
            raise PlacementError(
                f"a slot holds expert {int(self.expert_of_slot.max())} of {self.num_experts} experts"
            )

    @classmethod
    def of(cls, expert_of_slot: torch.Tensor, slots_of_rank: Sequence[int], num_experts: int) -> RouteTable:
        """Make a table in which every rank lives."""
        slots = tuple(slots_of_rank)
        return cls(expert_of_slot.to("cpu", torch.int64), slots, num_experts, (True,) * len(slots))

    def without(self, rank: int) -> RouteTable:
        """Return the table that does not send to `rank`."""
        return self._with(rank, False)

    def with_rank(self, rank: int) -> RouteTable:
        """Return the table that sends to `rank` again, which has its experts."""
        return self._with(rank, True)

    def _with(self, rank: int, lives: bool) -> RouteTable:
        if not 0 <= rank < len(self.active):
            raise PlacementError(f"rank {rank} is not one of {len(self.active)} ranks")
        active = (*self.active[:rank], lives, *self.active[rank + 1 :])
        return RouteTable(self.expert_of_slot, self.slots_of_rank, self.num_experts, active)

    @cached_property
    def owners(self) -> ExpertOwners:
        """Whose each slot is, for a dispatch: its experts are slots."""
        ranks = [rank for rank, slots in enumerate(self.slots_of_rank) for _ in range(slots)]
        return ExpertOwners(tuple(ranks), len(self.slots_of_rank))

    @cached_property
    def replicas(self) -> torch.Tensor:
        """int64 [experts]: how many live slots each expert has."""
        return torch.bincount(self._live_experts[self._live_experts >= 0], minlength=self.num_experts)

    @property
    def lost_experts(self) -> tuple[int, ...]:
        """Experts that no live slot has: their weights have to come from a backup."""
        return tuple((self.replicas == 0).nonzero().flatten().tolist())

    @cached_property
    def _live_experts(self) -> torch.Tensor:
        lives = torch.tensor(self.active).repeat_interleave(torch.tensor(self.slots_of_rank))
        return self.expert_of_slot.masked_fill(~lives, -1)

    @cached_property
    def _sorted_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Live slots in order of expert, and where those of each expert begin."""
        order = self._live_experts.argsort(stable=True)
        dead = int((self._live_experts < 0).sum())
        return order[dead:], self.replicas.cumsum(0) - self.replicas

    def route(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Turn logical experts into slots: int64 [tokens, topk] to the same shape.

        Replicas take tokens by turns: token t goes to live replica t modulo their number, so every rank
        computes the same. -1 stays, and what no live slot has becomes -1. Raises RoutingError for an expert
        that is not there.
        """
        if topk_idx.dim() != 2 or topk_idx.dtype != torch.int64:
            raise RoutingError(
                f"topk_idx must be int64 [tokens, topk], not {topk_idx.dtype} {tuple(topk_idx.shape)}"
            )
        if topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < self.num_experts:
            raise RoutingError(
                f"topk_idx names experts from {int(topk_idx.min())} to {int(topk_idx.max())}; "
                f"they go from 0 to {self.num_experts - 1}, and -1 drops a choice"
            )
        slots, first = (one.to(topk_idx.device) for one in self._sorted_slots)
        chosen = topk_idx.clamp(min=0)
        live = self.replicas.to(topk_idx.device)[chosen]
        turn = torch.arange(len(topk_idx), device=topk_idx.device)[:, None] % live.clamp(min=1)
        served = (topk_idx >= 0) & (live > 0)
        if not len(slots):
            return torch.full_like(topk_idx, -1)
        return slots[(first[chosen] + turn).clamp(max=len(slots) - 1)].masked_fill(~served, -1)
