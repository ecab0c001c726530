"""The receiving half of dispatches with as many rows as there are: one for each token (normal) or for each
choice (expanded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mooncake_ep import _core
from mooncake_ep._errors import ShapeError
from mooncake_ep.exchange.channel import Channel
from mooncake_ep.exchange.dispatching import sources_of
from mooncake_ep.exchange.ownership import local_ids
from mooncake_ep.exchange.rows import COUNT, GROUP, Payload, Source
from mooncake_ep.layout import ExpertOwners

__all__ = ["Asked", "Gathered", "Routed", "gather"]


@dataclass(frozen=True, eq=False)
class Routed:
    """What a combine needs to know of its dispatch.

    `topk_idx` [tokens, topk]: what this rank sent. `begins` int64: where the rows of each source begin here
    << 32 | how many they are; [ranks], or [local experts, ranks] when expanded. `rows`: how many there are
    here, gaps included. `round`: the dispatch.
    """

    topk_idx: torch.Tensor
    owners: ExpertOwners
    begins: torch.Tensor
    rows: int
    expanded: bool
    round: int


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a dispatch brought: `x` [rows, hidden] and `scales` [rows, hidden / 128] of FP8, or None.

    `topk_idx` [rows, topk] of local experts or -1 (None when expanded); `topk_weights` float32 [rows, topk],
    or [rows] when expanded. `source_rank`, `source_token` int64 [rows], -1 in gaps. `per_expert` int64 [local
    experts].
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    source_rank: torch.Tensor
    source_token: torch.Tensor
    per_expert: torch.Tensor
    routed: Routed


@dataclass(frozen=True, eq=False)
class Asked:
    """What a rank asks of a dispatch: what it sent itself, and how rows are to come.

    `alignment` 1 or more expands: rows are grouped by expert, each group padded to a multiple of it. `rows`:
    make room for so many, 0: for those that come. `begins`: where the rows of each source go, as in a
    dispatch before.
    """

    payload: Payload
    topk_idx: torch.Tensor
    owners: ExpertOwners
    with_weights: bool
    alignment: int = 0
    rows: int = 0
    begins: torch.Tensor | None = None

    @property
    def expanded(self) -> bool:
        """Whether there is a row for every choice."""
        return self.alignment > 0


def gather(channel: Channel, number: int, asked: Asked, deadline_ns: int) -> Gathered:
    """Take what all ranks sent to our experts, in order of source rank, then of token."""
    sources = sources_of(channel, number, deadline_ns)
    _check_alike(sources, asked.payload)
    while True:
        taken = _take(sources, asked, number, channel.peers.rank)
        kept = [source for source in sources if channel.is_intact(source.rank, number)]
        if len(kept) == len(sources):
            break
        sources = kept  # what was read of the others is of no round
    channel.finish_all(number)
    return taken


def _check_alike(sources: Sequence[Source], payload: Payload) -> None:
    kind = (payload.x.shape[1], payload.x.dtype)
    for source in sources:
        if (source.hidden, source.dtype) != kind:
            raise ShapeError(
                f"rank {source.rank} dispatched rows of {source.hidden} {source.dtype}, "
                f"this rank of {kind[0]} {kind[1]}"
            )


def _take(sources: Sequence[Source], asked: Asked, number: int, rank: int) -> Gathered:
    owners = asked.owners
    local_of = local_ids(owners, rank)
    tokens, per_expert = _count(sources, owners.num_ranks, local_of, len(owners.experts_of(rank)))
    begins = asked.begins
    if begins is None:
        begins = _places(tokens, per_expert, asked.alignment)
    needed = _rows_needed(begins, asked.alignment)
    if asked.rows and needed > asked.rows:
        raise ShapeError(
            f"{needed} rows arrived, but room was asked for {asked.rows}; ask for ranks * tokens"
        )
    rows = asked.rows or needed
    routed = Routed(asked.topk_idx, owners, begins, rows, asked.expanded, number)
    # Gaps are zero; without gaps, nothing has to be cleared first.
    gaps = asked.expanded or rows > needed or len(sources) < owners.num_ranks
    found = _room_for(asked, routed, per_expert.sum(1), gaps)
    for source in sources:
        (_take_expanded if asked.expanded else _take_tokens)(
            source, found, local_of, int(tokens[source.rank])
        )
    return found


def _room_for(asked: Asked, routed: Routed, per_expert: torch.Tensor, gaps: bool) -> Gathered:
    make = torch.zeros if gaps else torch.empty
    rows, hidden, topk = routed.rows, asked.payload.x.shape[1], asked.topk_idx.shape[1]
    expanded, fp8 = asked.expanded, asked.payload.scales is not None
    return Gathered(
        x=make(rows, hidden, dtype=asked.payload.x.dtype),
        scales=make(rows, hidden // GROUP) if fp8 else None,
        topk_idx=None if expanded else torch.full((rows, topk), -1, dtype=torch.int64),
        topk_weights=torch.zeros((rows,) if expanded else (rows, topk)) if asked.with_weights else None,
        source_rank=torch.full((rows,), -1, dtype=torch.int64),
        source_token=torch.full((rows,), -1, dtype=torch.int64),
        per_expert=per_expert,
        routed=routed,
    )


def _count(
    sources: Sequence[Source], ranks: int, local_of: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [ranks] and choices [local experts, ranks] from each source."""
    tokens, choices = torch.zeros(ranks, dtype=torch.int64), torch.zeros(ranks, experts, dtype=torch.int64)
    for source in sources:
        row = choices[source.rank]
        tokens[source.rank] = _core.count_tokens(source.routing(local_of), row.data_ptr())
    return tokens, choices.t()


def _places(tokens: torch.Tensor, per_expert: torch.Tensor, alignment: int) -> torch.Tensor:
    if not alignment:
        return (tokens.cumsum(0) - tokens) << 32 | tokens
    counts = per_expert.sum(1)
    padded = -(-counts // alignment) * alignment
    first = padded.cumsum(0) - padded
    return (first[:, None] + per_expert.cumsum(1) - per_expert) << 32 | per_expert


def _rows_needed(begins: torch.Tensor, alignment: int) -> int:
    if not begins.numel():
        return 0
    last = int((begins.reshape(-1)[-1] >> 32) + (begins.reshape(-1)[-1] & COUNT))
    return -(-last // alignment) * alignment if alignment else last


def _take_tokens(source: Source, found: Gathered, local_of: torch.Tensor, tokens: int) -> None:
    begin, room = divmod(int(found.routed.begins[source.rank]), 1 << 32)
    if tokens != room:
        raise ShapeError(f"rank {source.rank} sent {tokens} tokens in place of the {room} of the handle")
    assert found.topk_idx is not None
    topk = found.topk_idx.shape[1]
    weights = found.topk_weights if source.weights_at else None
    _core.take_tokens(
        source.routing(local_of),
        source.rows(found.x, begin, found.scales),
        source.weights_at,
        found.topk_idx.data_ptr() + begin * topk * 8,
        0 if weights is None else weights.data_ptr() + begin * topk * 4,
        found.source_token.data_ptr() + begin * 8,
    )
    found.source_rank[begin : begin + tokens] = source.rank


def _take_expanded(source: Source, found: Gathered, local_of: torch.Tensor, tokens: int) -> None:
    first = (found.routed.begins[:, source.rank] >> 32).contiguous()
    counts = found.routed.begins[:, source.rank] & COUNT
    next_rows = first.clone()
    weights = found.topk_weights if source.weights_at else None
    _core.take_expanded(
        source.routing(local_of),
        source.rows(found.x, 0, found.scales),
        source.weights_at,
        next_rows.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        found.source_token.data_ptr(),
    )
    mine = torch.arange(int(counts.sum())) + (first - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    found.source_rank[mine] = source.rank
