"""Dispatch and combine in plain torch, all ranks in one process: what every faster implementation must equal.

Nothing is sent anywhere. A list has one entry per rank; entry r is what rank r would hold. The order of every
row and of every floating-point addition is fixed below, so an implementation can be compared bit by bit:

1. `dispatch` sends a token once to each rank that holds one of its experts. A rank sees tokens in order of
   source rank, then of token.
2. `apply_experts` multiplies each expert's output by its weight and adds in float32, in top-k order; the sum
   is rounded to the activation type.
3. `combine` adds the rows that the ranks return for a token in float32, in order of rank, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mooncake_ep._errors import PlacementError, ShapeError
from mooncake_ep.layout import ExpertOwners, get_dispatch_layout

__all__ = ["Received", "Tokens", "apply_experts", "combine", "dispatch"]

Expert = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one rank before a dispatch.

    `x` [tokens, hidden] of any float type; `topk_idx` int64 [tokens, topk], -1 for a dropped choice;
    `topk_weights` float32 [tokens, topk].
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, eq=False)
class Received:
    """What one rank holds after a dispatch: `rows` tokens, in order of source rank, then of source token.

    `x` [rows, hidden]; `topk_idx` int64 [rows, topk]: local expert ids, -1 for a choice that another rank
    serves; `topk_weights` float32 [rows, topk], 0 at those; `source_rank`, `source_token` int64 [rows]: where
    a row came from.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    source_rank: torch.Tensor
    source_token: torch.Tensor

    def tokens_per_expert(self, num_local_experts: int) -> torch.Tensor:
        """Return int32 [num_local_experts]: how many rows each expert of this rank has to work on."""
        counts = torch.bincount(self.topk_idx[self.topk_idx >= 0], minlength=num_local_experts)
        return counts.to(torch.int32)


def dispatch(inputs: Sequence[Tokens], owners: ExpertOwners) -> list[Received]:
    """Bring every token to the ranks that hold its experts.

    Raises PlacementError when there is not one input per rank, RoutingError for bad choices, ShapeError when
    the tensors do not fit together.
    """
    if len(inputs) != owners.num_ranks:
        raise PlacementError(
            f"{len(inputs)} inputs for an owner table of {owners.num_ranks} ranks; give one per rank"
        )
    in_rank = [get_dispatch_layout(tokens.topk_idx, owners).is_token_in_rank for tokens in inputs]
    _check_shapes(inputs)
    return [
        _concatenate(
            [_select(inputs, source, in_rank[source][:, rank], owners, rank) for source in range(len(inputs))]
        )
        for rank in range(owners.num_ranks)
    ]


def apply_experts(received: Received, expert: Expert) -> torch.Tensor:
    """Run one rank's experts on its rows and reduce over top-k; returns [rows, hidden] of the type of `x`.

    `expert(local_id, rows)` maps [n, hidden] to the same shape. An expert without rows is not called.
    """
    outputs = torch.zeros(
        *received.topk_idx.shape, received.x.shape[1], dtype=torch.float32, device=received.x.device
    )
    for local_id in sorted(set(received.topk_idx.flatten().tolist()) - {-1}):
        rows, columns = (received.topk_idx == local_id).nonzero(as_tuple=True)
        outputs[rows, columns] = expert(local_id, received.x[rows]).float()
    total = torch.zeros_like(received.x, dtype=torch.float32)
    for column in range(received.topk_idx.shape[1]):
        total += outputs[:, column] * received.topk_weights[:, column, None]
    return total.to(received.x.dtype)


def combine(
    outputs: Sequence[torch.Tensor], received: Sequence[Received], tokens: Sequence[int]
) -> list[torch.Tensor]:
    """Bring the reduced rows of every rank back to where their tokens came from and add them.

    `outputs[r]` [rows, hidden] is what rank r computed for `received[r]`; `tokens[r]` is how many tokens rank
    r had. Returns [tokens, hidden] per rank; a token that was sent nowhere is 0. Raises ShapeError when rows
    do not match.
    """
    if not len(outputs) == len(received) == len(tokens):
        raise ShapeError(
            f"{len(outputs)} outputs, {len(received)} received batches and {len(tokens)} token counts: "
            "combine needs one of each per rank"
        )
    for rank, (output, batch) in enumerate(zip(outputs, received, strict=True)):
        if output.shape != batch.x.shape:
            raise ShapeError(
                f"rank {rank} returns shape {tuple(output.shape)} for rows of shape {tuple(batch.x.shape)}"
            )
    combined = []
    for source, count in enumerate(tokens):
        total = torch.zeros(
            count, outputs[source].shape[1], dtype=torch.float32, device=outputs[source].device
        )
        for output, batch in zip(outputs, received, strict=True):
            mine = batch.source_rank == source
            # A rank returns a token at most once, so this adds each row to a different place.
            total[batch.source_token[mine]] += output[mine].float()
        combined.append(total.to(outputs[source].dtype))
    return combined


def _select(
    inputs: Sequence[Tokens], source: int, wanted: torch.Tensor, owners: ExpertOwners, rank: int
) -> Received:
    """Take the tokens of one source rank that go to `rank`; blank the choices that other ranks serve."""
    tokens = inputs[source]
    device = tokens.x.device
    index = wanted.nonzero().flatten()
    chosen = tokens.topk_idx[index]
    owner_of = torch.tensor(owners.owner_of, device=device)
    local_id_of = torch.tensor(owners.local_id_of, device=device)
    here = (chosen >= 0) & (owner_of[chosen.clamp(min=0)] == rank)
    return Received(
        x=tokens.x[index],
        topk_idx=local_id_of[chosen.clamp(min=0)].masked_fill(~here, -1),
        topk_weights=tokens.topk_weights[index].masked_fill(~here, 0.0),
        source_rank=torch.full_like(index, source),
        source_token=index,
    )


def _concatenate(parts: Sequence[Received]) -> Received:
    return Received(
        x=torch.cat([part.x for part in parts]),
        topk_idx=torch.cat([part.topk_idx for part in parts]),
        topk_weights=torch.cat([part.topk_weights for part in parts]),
        source_rank=torch.cat([part.source_rank for part in parts]),
        source_token=torch.cat([part.source_token for part in parts]),
    )


def _check_shapes(inputs: Sequence[Tokens]) -> None:
    first = inputs[0]
    for rank, tokens in enumerate(inputs):
        if tokens.x.dim() != 2 or tokens.x.shape[0] != tokens.topk_idx.shape[0]:
            raise ShapeError(
                f"rank {rank}: x of shape {tuple(tokens.x.shape)} does not hold the "
                f"{tokens.topk_idx.shape[0]} tokens of topk_idx"
            )
        if tokens.topk_weights.shape != tokens.topk_idx.shape or tokens.topk_weights.dtype != torch.float32:
            raise ShapeError(
                f"rank {rank}: topk_weights must be float32 {tuple(tokens.topk_idx.shape)}, "
                f"not {tokens.topk_weights.dtype} {tuple(tokens.topk_weights.shape)}"
            )
        widths = (tokens.x.shape[1], tokens.topk_idx.shape[1], tokens.x.dtype)
        if widths != (first.x.shape[1], first.topk_idx.shape[1], first.x.dtype):
            raise ShapeError(
                f"rank {rank}: hidden size, top-k or type of x differ from those of rank 0: {widths}"
            )
