"""The way back of dispatches with as many rows as there are: rows are shown, and added where their tokens
came from.

Nothing but sums: weights are the caller's, who applies them before.
"""

from __future__ import annotations

import torch

from mooncake_ep import _core
from mooncake_ep._errors import ShapeError
from mooncake_ep.exchange.channel import Channel
from mooncake_ep.exchange.gathering import Routed
from mooncake_ep.exchange.ownership import experts_as_tensor
from mooncake_ep.exchange.rows import COUNT, check_room, sum_rows, write

__all__ = ["receive_sums", "send_rows"]

ROUND, ROWS, WIDTH, ITEM, WEIGHTS_AT, WEIGHT_WIDTH = range(6)


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
    header = channel.header(peers.rank, number)
    header[:WEIGHTS_AT] = [routed.round, routed.rows, x.shape[1], x.element_size()]
    header[WEIGHTS_AT], header[WEIGHT_WIDTH] = weights_at, width
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
