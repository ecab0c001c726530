"""The normal mode of `Buffer`: one row for each token and rank, as in training and prefill."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake_ep.events import EventOverlap
from mooncake_ep.exchange.gathering import Routed
from mooncake_ep.group_buffer import DEFAULT_TIMEOUT_US
from mooncake_ep.layout import get_dispatch_layout
from mooncake_ep.row_buffer import RowBuffer, Rows, rows_of

__all__ = ["Config", "NormalMode"]

Dispatched = tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Routed, EventOverlap]


@dataclass(frozen=True)
class Config:
    """Sizes by which a GPU's kernels are tuned. Calls take them, and on a CPU they change nothing."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256


class NormalMode(RowBuffer):
    """The calls of the normal mode."""

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """What `dispatch` takes as its config, for any number of ranks."""
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """What `combine` takes as its config, for any number of ranks."""
        return Config()

    @staticmethod
    def capture() -> EventOverlap:
        """An event to wait for what was done so far, which on a CPU is done."""
        return EventOverlap()

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where tokens go: int32 [ranks], None (no second level of ranks), int32 [experts], bool
        [tokens, ranks]."""
        layout = get_dispatch_layout(topk_idx, self._owners(num_experts))
        return layout.tokens_per_rank, None, layout.tokens_per_expert, layout.is_token_in_rank, EventOverlap()

    def dispatch(
        self,
        x: Rows,
        handle: Routed | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = DEFAULT_TIMEOUT_US,
    ) -> Dispatched:
        """Send every token once to each rank that has one of its experts.

        `x` is bf16 or float32 [tokens, hidden], or a pair of e4m3 and float32 scales [tokens, hidden / 128].
        `topk_idx` int64 [tokens, topk] and `topk_weights` float32 go along; the number of experts is that of
        `num_tokens_per_expert`, which is needed with them. The other layouts may be given; they are counted
        anew.

        Returns rows in order of source rank, then of token: `recv_x`, `recv_topk_idx` of local experts or -1,
        `recv_topk_weights` (0 there), how many rows each local expert has, rounded up to `expert_alignment`,
        the handle, and an event. `num_worst_tokens`: make so many rows whatever comes, the last with -1, and
        return an empty list. With the `handle` of a dispatch before, rows go where its rows went, and
        indices, weights and counts are None. Raises ShapeError, RoutingError, PlacementError.
        """
        experts = None if num_tokens_per_expert is None else len(num_tokens_per_expert)
        got = self._dispatch_rows(
            x, topk_idx, topk_weights, experts, active_ranks, timeout_us, handle=handle, rows=num_worst_tokens
        )
        if handle is not None:
            return rows_of(got), None, None, None, handle, EventOverlap()
        counts = [-(-one // expert_alignment) * expert_alignment for one in got.per_expert.tolist()]
        told = [] if num_worst_tokens else counts
        return rows_of(got), got.topk_idx, got.topk_weights, told, got.routed, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: Routed,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = DEFAULT_TIMEOUT_US,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back to where their tokens came from and add them, in float32, ranks ascending.

        `x` [rows, hidden] and `topk_weights` float32 [rows, topk] are as `dispatch` gave them; `bias`, one or
        two of [tokens, hidden], is added first. Returns [tokens, hidden], the sums of the weights or None,
        and an event. Raises ShapeError.
        """
        out, sums = self._combine_rows(x, handle, topk_weights, bias, active_ranks, timeout_us)
        return out, sums, EventOverlap()
