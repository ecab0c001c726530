"""Expanded dispatch and combine in plain torch, all ranks in one process: a row for every (token, expert).

Rows are grouped by local expert, in order of source rank, then of token; a combine adds a token's rows in
float32 in top-k order, after the bias, and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake_ep.layout import ExpertOwners
from mooncake_ep.reference import Tokens

__all__ = ["combine_expanded", "dispatch_expanded"]

Place = tuple[int, int, int]  # source rank, source token, choice


def dispatch_expanded(
    inputs: Sequence[Tokens], owners: ExpertOwners, alignment: int
) -> list[tuple[torch.Tensor, list[Place | None]]]:
    """For each rank its rows [rows, hidden], padding is zero, and where each came from (None: padding)."""
    found = []
    for rank in range(owners.num_ranks):
        places: list[Place | None] = []
        for expert in owners.experts_of(rank):
            for source, tokens in enumerate(inputs):
                chosen = (tokens.topk_idx == expert).nonzero().tolist()
                places += [(source, token, choice) for token, choice in chosen]
            places += [None] * (-len(places) % alignment)
        x = torch.zeros(len(places), inputs[0].x.shape[1], dtype=inputs[0].x.dtype)
        for row, place in enumerate(places):
            if place is not None:
                x[row] = inputs[place[0]].x[place[1]]
        found.append((x, places))
    return found


def combine_expanded(
    outputs: Sequence[torch.Tensor],
    places: Sequence[Sequence[Place | None]],
    inputs: Sequence[Tokens],
    bias: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """For each rank [tokens, hidden]; `bias` is added first, the same on every rank."""
    row_of = {
        place: output[row]
        for output, of_rank in zip(outputs, places, strict=True)
        for row, place in enumerate(of_rank)
        if place is not None
    }
    combined = []
    for rank, tokens in enumerate(inputs):
        total = torch.zeros(tokens.x.shape)
        for one in bias:
            total += one[: len(total)].float()
        for token in range(len(total)):
            for choice in range(tokens.topk_idx.shape[1]):
                if (rank, token, choice) in row_of:
                    total[token] += row_of[rank, token, choice].float()
        combined.append(total.to(tokens.x.dtype))
    return combined
