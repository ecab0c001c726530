"""Low-latency dispatch and combine in plain torch, all ranks in one process: a row for every (token, expert).

Rows of a rank are packed by local expert, in order of source rank, then of token. A combine multiplies what
an expert made of a token by its weight and adds in float32, in top-k order, and rounds once to bf16.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mooncake_ep import reference_fp8
from mooncake_ep._errors import PlacementError, ShapeError
from mooncake_ep.layout import ExpertOwners
from mooncake_ep.reference import Tokens

__all__ = ["Packed", "combine", "dispatch"]


@dataclass(frozen=True, eq=False)
class Packed:
    """What one rank holds after a dispatch, in blocks of `capacity` = ranks * max tokens rows of each expert.

    `x` [local experts, capacity, hidden], bf16 or e4m3; of expert e the first `counts[e]` rows are good, the
    rest is zero. `scales` float32 [local experts, capacity, hidden / 128] of e4m3, or None. `counts` int32
    [local experts]. `src_info` int32 [local experts, capacity]: the source token of each row, -1 behind the
    last. `layout_range` int64 [local experts, ranks]: where the rows of a source begin << 32 | how many.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


def dispatch(
    inputs: Sequence[Tokens],
    owners: ExpertOwners,
    max_tokens: int,
    *,
    use_fp8: bool = False,
    round_scale: bool = False,
) -> list[Packed]:
    """Bring bf16 tokens to the ranks of their experts; one batch for each rank.

    Raises PlacementError when there is not one input for each rank, ShapeError for more than `max_tokens` or
    tokens that are not bf16.
    """
    if len(inputs) != owners.num_ranks:
        raise PlacementError(f"{len(inputs)} inputs for {owners.num_ranks} ranks; give one per rank")
    for rank, tokens in enumerate(inputs):
        if len(tokens.x) > max_tokens or tokens.x.dtype != torch.bfloat16:
            raise ShapeError(
                f"rank {rank} has {len(tokens.x)} tokens of {tokens.x.dtype}; "
                f"up to {max_tokens} of bfloat16 can be dispatched"
            )
    return [_pack(inputs, owners, rank, max_tokens, use_fp8, round_scale) for rank in range(len(inputs))]


def _pack(
    inputs: Sequence[Tokens],
    owners: ExpertOwners,
    rank: int,
    max_tokens: int,
    use_fp8: bool,
    round_scale: bool,
) -> Packed:
    experts, capacity, hidden = owners.experts_of(rank), len(inputs) * max_tokens, inputs[0].x.shape[1]
    sent = [reference_fp8.quantize(one.x, round_scale) if use_fp8 else (one.x, None) for one in inputs]
    dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
    packed = Packed(
        x=torch.zeros(len(experts), capacity, hidden, dtype=dtype),
        scales=torch.zeros(len(experts), capacity, hidden // 128) if use_fp8 else None,
        counts=torch.zeros(len(experts), dtype=torch.int32),
        src_info=torch.full((len(experts), capacity), -1, dtype=torch.int32),
        layout_range=torch.zeros(len(experts), len(inputs), dtype=torch.int64),
    )
    for local, expert in enumerate(experts):
        for source, tokens in enumerate(inputs):
            chosen = (tokens.topk_idx == expert).any(dim=1).nonzero().flatten()
            begin = int(packed.counts[local])
            rows = slice(begin, begin + len(chosen))
            values, scales = sent[source]
            packed.x[local, rows] = values[chosen]
            if packed.scales is not None and scales is not None:
                packed.scales[local, rows] = scales[chosen]
            packed.src_info[local, rows] = chosen.int()
            packed.layout_range[local, source] = begin << 32 | len(chosen)
            packed.counts[local] += len(chosen)
    return packed


def combine(
    outputs: Sequence[torch.Tensor],
    packed: Sequence[Packed],
    inputs: Sequence[Tokens],
    owners: ExpertOwners,
    dead_ranks: Collection[int] = (),
) -> list[torch.Tensor]:
    """Bring results back and add them, times their weights: bf16 [tokens, hidden] for each rank.

    `outputs[r]` bf16 [local experts, capacity, hidden] is what rank r made of `packed[r]`. Experts of
    `dead_ranks` add nothing. Raises ShapeError when rows do not match.
    """
    for rank, (output, batch) in enumerate(zip(outputs, packed, strict=True)):
        if output.shape != batch.x.shape or output.dtype != torch.bfloat16:
            raise ShapeError(
                f"rank {rank} returns {output.dtype} {tuple(output.shape)} for rows {tuple(batch.x.shape)}"
            )
    combined = []
    for source, tokens in enumerate(inputs):
        total = torch.zeros(tokens.x.shape)
        for choice in range(tokens.topk_idx.shape[1]):
            for token, expert in enumerate(tokens.topk_idx[:, choice].tolist()):
                if expert >= 0 and owners.owner_of[expert] not in dead_ranks:
                    row = _row_of(outputs, packed, owners, expert, source, token)
                    total[token] += row.float() * tokens.topk_weights[token, choice]
        combined.append(total.to(torch.bfloat16))
    return combined


def _row_of(
    outputs: Sequence[torch.Tensor],
    packed: Sequence[Packed],
    owners: ExpertOwners,
    expert: int,
    source: int,
    token: int,
) -> torch.Tensor:
    rank, local = owners.owner_of[expert], owners.local_id_of[expert]
    begin, count = divmod(int(packed[rank].layout_range[local, source]), 1 << 32)
    tokens = packed[rank].src_info[local, begin : begin + count]
    return outputs[rank][local, begin + int((tokens == token).nonzero()[0, 0])]
