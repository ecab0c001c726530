"""What the normal mode and the elastic buffer share: a row for each token and rank, or for each choice."""

from __future__ import annotations

from dataclasses import replace

import torch

from mooncake_ep._errors import RoutingError, ShapeError
from mooncake_ep.exchange.dispatching import post_rows
from mooncake_ep.exchange.gathering import Asked, Gathered, Routed, gather
from mooncake_ep.exchange.peers import deadline_of
from mooncake_ep.exchange.returning import receive_sums, send_rows
from mooncake_ep.exchange.rows import check_topk, payload_of
from mooncake_ep.group_buffer import GroupBuffer
from mooncake_ep.staging import Staging

__all__ = ["RowBuffer", "Rows"]

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class RowBuffer(GroupBuffer):
    """Both halves of such calls, on tensors of any device."""

    def _dispatch_rows(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        num_experts: int | None,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        *,
        handle: Routed | None,
        alignment: int = 0,
        rows: int = 0,
    ) -> Gathered:
        """Send rows to where `topk_idx` says, or as the dispatch of `handle` did, and take what comes."""
        values, scales = x if isinstance(x, tuple) else (x, None)
        staging = Staging(values.device)
        inside = staging.inward(values)
        payload = payload_of(inside if scales is None else (inside, staging.inward(scales)))
        if handle is not None:
            if topk_idx is not None or len(payload.x) != len(handle.topk_idx):
                raise ShapeError(
                    f"{len(payload.x)} tokens, but the handle is of {len(handle.topk_idx)}; with a handle, "
                    "give as many and no topk_idx"
                )
            topk, owners, begins, rows = handle.topk_idx, handle.owners, handle.begins, handle.rows
        elif topk_idx is None or num_experts is None:
            raise RoutingError("a dispatch without a handle needs topk_idx and the number of experts")
        else:
            owners, begins = self._owners(num_experts), None
            topk = check_topk(staging.inward(topk_idx), len(payload.x), num_experts).clone()
        weights = _checked_weights(topk_weights, topk)
        self._give_up(active_ranks)
        deadline = deadline_of(timeout_us)
        number = post_rows(self._dispatches, payload, topk, weights, deadline)
        asked = Asked(payload, topk, owners, weights is not None, alignment, rows, begins)
        got = gather(self._dispatches, number, asked, deadline)
        self._tell_active(active_ranks)
        return replace(
            got,
            x=staging.outward(got.x),
            scales=None if got.scales is None else staging.outward(got.scales),
            topk_idx=None if got.topk_idx is None else staging.outward(got.topk_idx),
            topk_weights=None if got.topk_weights is None else staging.outward(got.topk_weights),
        )

    def _combine_rows(
        self,
        x: torch.Tensor,
        routed: Routed,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows back; the sums [tokens, hidden], and those of the weights [tokens, topk]."""
        staging = Staging(x.device)
        out = torch.empty(len(routed.topk_idx), x.shape[1], dtype=x.dtype)
        first = _checked_bias(bias, out)
        weights = None if topk_weights is None else staging.inward(topk_weights)
        self._give_up(active_ranks)
        deadline = deadline_of(timeout_us)
        number = send_rows(self._combines, staging.inward(x), weights, routed, deadline)
        sums = None if weights is None else torch.empty(routed.topk_idx.shape, dtype=torch.float32)
        flat = sums.view(-1, 1) if sums is not None and routed.expanded else sums
        receive_sums(self._combines, number, routed, out, flat, first, deadline)
        self._tell_active(active_ranks)
        return staging.outward(out), None if sums is None else staging.outward(sums)


def rows_of(got: Gathered) -> Rows:
    """What came, as it was sent: rows, or rows and their scales."""
    return got.x if got.scales is None else (got.x, got.scales)


def _checked_weights(topk_weights: torch.Tensor | None, topk_idx: torch.Tensor) -> torch.Tensor | None:
    if topk_weights is None:
        return None
    if topk_weights.shape != topk_idx.shape or topk_weights.dtype != torch.float32:
        raise ShapeError(
            f"topk_weights must be float32 {tuple(topk_idx.shape)}, "
            f"not {topk_weights.dtype} {tuple(topk_weights.shape)}"
        )
    return Staging.inward(topk_weights)


def _checked_bias(
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None, out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return up to two biases; raise ShapeError unless they are like the result."""
    given = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
    if len(given) > 2 or any(one.shape != out.shape or one.dtype != out.dtype for one in given):
        raise ShapeError(f"bias must be up to two of {out.dtype} {tuple(out.shape)}")
    return tuple(Staging.inward(one) for one in given)
