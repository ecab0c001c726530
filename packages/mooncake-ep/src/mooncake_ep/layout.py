"""Who gets which token: the expert owner table and the counts that a dispatch starts from.

Pure functions of tensors; they run on the device of their input and keep no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from mooncake_ep._errors import PlacementError, RoutingError

__all__ = ["DispatchLayout", "ExpertOwners", "get_dispatch_layout"]


@dataclass(frozen=True)
class ExpertOwners:
    """Which rank holds which expert. Any table is fine: ranks may hold different numbers of experts, or none.

    `owner_of[expert]` is a rank in `[0, num_ranks)`. An expert's *local id* is its place among the experts of
    its owner, in ascending order of expert. Raises PlacementError when the table is empty or names another
    rank.
    """

    owner_of: tuple[int, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not self.owner_of:
            raise PlacementError(
                f"expert owner table of {len(self.owner_of)} experts over {self.num_ranks} ranks: "
                "there must be at least one of each"
            )
        for expert, rank in enumerate(self.owner_of):
            if not 0 <= rank < self.num_ranks:
                raise PlacementError(
                    f"expert {expert} is given to rank {rank}, but ranks go from 0 to {self.num_ranks - 1}"
                )

    @classmethod
    def even(cls, num_experts: int, num_ranks: int) -> ExpertOwners:
        """Give consecutive experts to consecutive ranks; the first `num_experts % num_ranks` get one more."""
        if num_ranks < 1:
            raise PlacementError(f"{num_experts} experts cannot be spread over {num_ranks} ranks")
        share, extra = divmod(num_experts, num_ranks)
        counts = [share + (rank < extra) for rank in range(num_ranks)]
        return cls(tuple(rank for rank, count in enumerate(counts) for _ in range(count)), num_ranks)

    @property
    def num_experts(self) -> int:
        """How many experts there are on all ranks."""
        return len(self.owner_of)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the experts of one rank, ascending: position is local id."""
        return self._experts[rank] if 0 <= rank < self.num_ranks else ()

    @cached_property
    def _experts(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for expert, owner in enumerate(self.owner_of):
            found[owner].append(expert)
        return tuple(tuple(experts) for experts in found)

    @cached_property
    def local_id_of(self) -> tuple[int, ...]:
        """The local id of every expert."""
        seen = [0] * self.num_ranks
        ids = []
        for rank in self.owner_of:
            ids.append(seen[rank])
            seen[rank] += 1
        return tuple(ids)


@dataclass(frozen=True, eq=False)
class DispatchLayout:
    """What one rank's tokens need from a dispatch.

    `tokens_per_rank`   int32 [ranks]: tokens that go to each rank; a token goes to a rank at most once.
    `tokens_per_expert` int32 [experts]: tokens that chose each expert.
    `is_token_in_rank`  bool [tokens, ranks]: whether a token goes to a rank.
    """

    tokens_per_rank: torch.Tensor
    tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def get_dispatch_layout(topk_idx: torch.Tensor, owners: ExpertOwners) -> DispatchLayout:
    """Count where the tokens of one rank go.

    `topk_idx` is int64 [tokens, topk]: the experts each token chose; -1 is a choice that was dropped. Same
    meaning as the function of this name in DeepEP, except that owners come from a table and so need not be
    even. Raises RoutingError for another type or shape, an expert that is not in the table, or one that a
    token names twice.
    """
    _check_routing(topk_idx, owners.num_experts)
    chosen = topk_idx >= 0
    owner_of = torch.tensor(owners.owner_of, dtype=torch.int64, device=topk_idx.device)
    # Dropped choices go to a column past the last rank, which is then cut off.
    rank_of = owner_of[topk_idx.clamp(min=0)].masked_fill(~chosen, owners.num_ranks)
    shape = (topk_idx.shape[0], owners.num_ranks + 1)
    in_rank = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device).scatter_(1, rank_of, True)
    in_rank = in_rank[:, : owners.num_ranks].contiguous()
    per_expert = torch.bincount(topk_idx[chosen], minlength=owners.num_experts)
    return DispatchLayout(in_rank.sum(0, dtype=torch.int32), per_expert.to(torch.int32), in_rank)


def _check_routing(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Raise RoutingError unless `topk_idx` is int64 [tokens, topk] of distinct experts or -1."""
    if topk_idx.dtype != torch.int64 or topk_idx.dim() != 2:
        raise RoutingError(
            f"topk_idx must be int64 [tokens, topk], not {topk_idx.dtype} of shape {tuple(topk_idx.shape)}"
        )
    outside = (topk_idx < -1) | (topk_idx >= num_experts)
    if bool(outside.any()):
        token, column = outside.nonzero()[0].tolist()
        raise RoutingError(
            f"token {token} chose expert {int(topk_idx[token, column])}; "
            f"experts go from 0 to {num_experts - 1}, and -1 drops a choice"
        )
    ordered = topk_idx.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token, column = twice.nonzero()[0].tolist()
        raise RoutingError(
            f"token {token} chose expert {int(ordered[token, column])} twice; "
            "give it once, with the sum of both weights"
        )
