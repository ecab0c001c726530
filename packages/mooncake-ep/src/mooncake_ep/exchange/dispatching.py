"""The sending half of a dispatch, which all modes share: routing and rows into our window, once for all
ranks."""

from __future__ import annotations

import torch

from mooncake_ep import _core
from mooncake_ep._errors import ShapeError
from mooncake_ep.exchange.channel import Channel
from mooncake_ep.exchange.rows import DTYPES, GROUP, Payload, Source, check_room, write

__all__ = ["post_rows", "sources_of"]

TOKENS, TOPK, HIDDEN, DTYPE, GROUPS, HAS_WEIGHTS, ROUND, SCALES_AT = range(8)


def post_rows(
    channel: Channel,
    payload: Payload,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    deadline_ns: int,
    *,
    quantize: bool = False,
    round_scale: bool = False,
) -> int:
    """Write one round of a dispatch and show it; returns its number.

    `quantize` turns bf16 rows into e4m3 on their way, so they are written once and in the smaller form.
    """
    x = payload.x
    tokens, hidden = x.shape
    if quantize and (hidden % GROUP or x.dtype != torch.bfloat16):
        raise ShapeError(f"FP8 needs bfloat16 rows of a multiple of {GROUP} channels, not {x.dtype} {hidden}")
    dtype = torch.float8_e4m3fn if quantize else x.dtype
    groups = hidden // GROUP if dtype == torch.float8_e4m3fn else 0
    row_bytes = hidden * dtype.itemsize
    check_room(topk_idx.numel() * 12 + 128, tokens * (row_bytes + 4 * groups) + 64)
    number = channel.claim(deadline_ns)
    peers = channel.peers
    rows_at = channel.rows(number)
    scales_at = -(-(rows_at + tokens * row_bytes) // 64) * 64
    numbers = (tokens, topk_idx.shape[1], hidden, DTYPES.index(dtype), groups, topk_weights is not None)
    channel.header(peers.rank, number)[: SCALES_AT + 1] = [*map(int, numbers), number, scales_at]
    tables = write(peers, channel.tables(number), topk_idx)
    if topk_weights is not None:
        write(peers, tables, topk_weights)
    if quantize:
        to, scales_to = (peers.address(peers.rank, at) for at in (rows_at, scales_at))
        _core.quantize(x.data_ptr(), tokens, hidden, round_scale, to, scales_to)
    else:
        write(peers, rows_at, x)
        if payload.scales is not None:
            write(peers, scales_at, payload.scales)
    return channel.post()


def sources_of(
    channel: Channel, number: int, deadlines_ns: int, waits_us: list[int] | None = None
) -> list[Source]:
    """Wait for what every rank posted in a round; ranks that are gone are left out, ascending.

    `waits_us` [ranks] is increased by how long each was waited for.
    """
    found = []
    for rank in range(channel.peers.size):
        if channel.wait(rank, number, deadlines_ns, waits_us):
            source = _source(channel, rank, number)
            if source is not None:
                found.append(source)
    return found


def _source(channel: Channel, rank: int, number: int) -> Source | None:
    """What a rank says of a round, or None when it is in another one: it gave us up."""
    header = list(channel.header(rank, number)[: SCALES_AT + 1])
    if header[ROUND] != number or not channel.is_intact(rank, number):
        channel.peers.alive[rank] = False
        return None
    peers, tables = channel.peers, channel.tables(number)
    tokens, topk = header[TOKENS], header[TOPK]
    return Source(
        rank=rank,
        tokens=tokens,
        topk=topk,
        hidden=header[HIDDEN],
        dtype=DTYPES[header[DTYPE]],
        groups=header[GROUPS],
        topk_at=peers.address(rank, tables),
        weights_at=peers.address(rank, tables + tokens * topk * 8) if header[HAS_WEIGHTS] else 0,
        rows_at=peers.address(rank, channel.rows(number)),
        scales_at=peers.address(rank, header[SCALES_AT]) if header[GROUPS] else 0,
    )
