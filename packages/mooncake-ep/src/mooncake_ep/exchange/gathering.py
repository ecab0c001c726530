"""Dispatches and combines with as many rows as there are: one for each token (normal) or for each choice
(expanded).

A combine only adds: weights are the caller's, who applies them before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mooncake_ep import _core
from mooncake_ep._errors import ShapeError
from mooncake_ep.exchange.channel import Channel
from mooncake_ep.exchange.dispatching import sources_of
from mooncake_ep.exchange.low_latency import experts_as_tensor, local_ids
from mooncake_ep.exchange.rows import GROUP, Payload, Source, check_room, sum_rows, write
from mooncake_ep.layout import ExpertOwners

__all__ = ["Gathered", "Rounds", "Routed", "gather", "receive_sums", "send_rows"]

ROUND, ROWS, WIDTH, ITEM, WEIGHTS_AT, WEIGHT_WIDTH = range(6)
COUNT = 0xFFFFFFFF


@dataclass(frozen=True)
class Rounds:
    """Both kinds of rounds of one rank."""

    dispatches: Channel
    combines: Channel


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


def gather(
    channel: Channel,
    number: int,
    payload: Payload,
    topk_idx: torch.Tensor,
    owners: ExpertOwners,
    deadline_ns: int,
    *,
    with_weights: bool,
    alignment: int = 0,
    rows: int = 0,
    begins: torch.Tensor | None = None,
) -> Gathered:
    """Take what all ranks sent to our experts, in order of source rank, then of token.

    `alignment` 1 or more expands: rows are grouped by expert, each group padded to a multiple of it. `rows`:
    make room for so many, 0: for those that come. `begins`: where the rows of each source go, as in a
    dispatch before.
    """
    rank = channel.peers.rank
    local_of, experts = local_ids(owners, rank), len(owners.experts_of(rank))
    sources = sources_of(channel, number, deadline_ns)
    _check_alike(sources, payload)
    while True:
        taken = _take(
            sources,
            payload,
            topk_idx,
            owners,
            local_of,
            experts,
            with_weights,
            alignment,
            rows,
            begins,
            number,
        )
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


def _take(
    sources: Sequence[Source],
    payload: Payload,
    topk_idx: torch.Tensor,
    owners: ExpertOwners,
    local_of: torch.Tensor,
    experts: int,
    with_weights: bool,
    alignment: int,
    rows: int,
    begins: torch.Tensor | None,
    number: int,
) -> Gathered:
    expanded = alignment > 0
    tokens, per_expert = _count(sources, owners.num_ranks, local_of, experts)
    if begins is None:
        begins = _places(tokens, per_expert, alignment)
    needed = _rows_needed(begins, alignment)
    if rows and needed > rows:
        raise ShapeError(f"{needed} rows arrived, but room was asked for {rows}; ask for ranks * tokens")
    rows = rows or needed
    hidden, topk = payload.x.shape[1], topk_idx.shape[1]
    fp8 = payload.scales is not None
    # Gaps are zero; without gaps, nothing has to be cleared first.
    make = torch.zeros if expanded or rows > needed or len(sources) < owners.num_ranks else torch.empty
    found = Gathered(
        x=make(rows, hidden, dtype=payload.x.dtype),
        scales=make(rows, hidden // GROUP) if fp8 else None,
        topk_idx=None if expanded else torch.full((rows, topk), -1, dtype=torch.int64),
        topk_weights=torch.zeros((rows,) if expanded else (rows, topk)) if with_weights else None,
        source_rank=torch.full((rows,), -1, dtype=torch.int64),
        source_token=torch.full((rows,), -1, dtype=torch.int64),
        per_expert=per_expert.sum(1),
        routed=Routed(topk_idx, owners, begins, rows, expanded, number),
    )
    for source in sources:
        (_take_expanded if expanded else _take_tokens)(source, found, local_of, int(tokens[source.rank]))
    return found


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


def send_rows(
    channel: Channel, x: torch.Tensor, weights: torch.Tensor | None, routed: Routed, deadline_ns: int
) -> int:
    """Show rows, and weights of rows, to the ranks that their tokens came from; returns the round."""
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32) or len(x) < routed.rows:
        raise ShapeError(
            f"x must be bfloat16 or float32 [{routed.rows}, hidden] as dispatched, "
            f"not {x.dtype} {tuple(x.shape)}"
        )
    if weights is not None and (len(weights) < routed.rows or weights.dtype != torch.float32):
        raise ShapeError(f"weights of {routed.rows} rows must be float32, not {weights.dtype} {len(weights)}")
    peers, values = channel.peers, x[: routed.rows].contiguous()
    check_room(routed.begins.numel() * 8 + 128, values.numel() * values.element_size() + routed.rows * 4096)
    number = channel.claim(deadline_ns)
    end = write(peers, channel.rows(number), values)
    weights_at = -(-end // 64) * 64
    width = 0
    if weights is not None:
        width = weights[0].numel() if len(weights) else 1
        write(peers, weights_at, weights[: routed.rows].contiguous())
    numbers: list[ctypes.c_int64 | int] = [
        routed.round,
        routed.rows,
        x.shape[1],
        x.element_size(),
        weights_at,
        width,
    ]
    channel.header(peers.rank, number)[: WEIGHT_WIDTH + 1] = numbers
    write(peers, channel.tables(number), routed.begins.contiguous())
    return channel.post()


def receive_sums(
    channel: Channel,
    number: int,
    routed: Routed,
    out: torch.Tensor,
    out_weights: torch.Tensor | None,
    first: tuple[torch.Tensor, ...],
    deadline_ns: int,
) -> None:
    """Add what came back for our tokens into `out`, after `first`: ranks ascending, or choices in top-k
    order.

    `out_weights` gets the sums of weights (normal) or each choice's weight (expanded). Who is gone adds
    nothing.
    """
    begins: dict[int, torch.Tensor] = {}
    for rank in range(channel.peers.size):
        if channel.wait(rank, number, deadline_ns):
            firsts = _first_rows(channel, rank, number, routed, out)
            if firsts is not None:
                begins[rank] = firsts
    while True:
        sum_rows(_addends(channel, number, routed, begins, weights=False), None, out, first)
        if out_weights is not None:
            addends = _addends(channel, number, routed, begins, weights=True)
            sum_rows(addends.view(-1, 1) if routed.expanded else addends, None, out_weights)
        torn = [rank for rank in begins if not channel.is_intact(rank, number)]
        if not torn:
            break
        for rank in torn:
            del begins[rank]
    channel.finish_all(number)


def _first_rows(
    channel: Channel, rank: int, number: int, routed: Routed, out: torch.Tensor
) -> torch.Tensor | None:
    """Where a rank's rows for us begin; None, and the rank is given up, when it did not have all our
    tokens."""
    header = channel.header(rank, number)
    experts = experts_as_tensor(routed.owners, rank)
    sent, shape = _sent(routed, rank), (channel.peers.size,)
    if header[ROUND] != routed.round or (header[WIDTH], header[ITEM]) != (out.shape[1], out.element_size()):
        channel.peers.alive[rank] = False
        return None
    if not routed.expanded:
        mine = channel.peers.view(rank, channel.tables(number), shape, torch.int64)[channel.peers.rank]
    else:
        table = channel.peers.view(rank, channel.tables(number), (len(experts), *shape), torch.int64)
        mine = table[:, channel.peers.rank]
    if not torch.equal(mine & COUNT, sent):
        channel.peers.alive[rank] = False
        return None
    return (mine >> 32).clone()


def _sent(routed: Routed, rank: int) -> torch.Tensor:
    """How many rows of ours a rank has: all together, or of each of its experts."""
    experts = experts_as_tensor(routed.owners, rank)
    chosen = routed.topk_idx[..., None] == experts
    return chosen.sum((0, 1)) if routed.expanded else chosen.any(2).any(1).sum()


def _addends(
    channel: Channel, number: int, routed: Routed, begins: dict[int, torch.Tensor], *, weights: bool
) -> torch.Tensor:
    """Addresses of what is to be added: int64 [tokens, ranks], or [tokens, topk] when expanded."""
    owners, topk_idx = routed.owners, routed.topk_idx
    bases = torch.zeros(owners.num_experts if routed.expanded else owners.num_ranks, dtype=torch.int64)
    row_bytes = 0
    for rank, first in begins.items():
        header = channel.header(rank, number)
        if weights and not header[WEIGHT_WIDTH]:
            continue
        row_bytes = header[WEIGHT_WIDTH] * 4 if weights else header[WIDTH] * header[ITEM]
        offset = header[WEIGHTS_AT] if weights else channel.rows(number)
        at = channel.peers.address(rank, offset) + first * row_bytes
        if routed.expanded:
            bases[experts_as_tensor(owners, rank)] = at
        else:
            bases[rank] = at
    addends = torch.empty(
        len(topk_idx), topk_idx.shape[1] if routed.expanded else owners.num_ranks, dtype=torch.int64
    )
    shape = (topk_idx.data_ptr(), len(topk_idx), topk_idx.shape[1])
    if routed.expanded:
        _core.find_choices(*shape, bases.data_ptr(), len(bases), row_bytes, addends.data_ptr())
    else:
        rank_of = torch.tensor(owners.owner_of, dtype=torch.int32)
        _core.find_ranks(
            *shape, rank_of.data_ptr(), bases.data_ptr(), len(bases), row_bytes, addends.data_ptr()
        )
    return addends
