"""`ElasticBuffer`: dispatch and combine with the interface of DeepEP's second version."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mooncake_ep.events import EventOverlap
from mooncake_ep.exchange.gathering import Gathered, Routed
from mooncake_ep.layout import ExpertOwners
from mooncake_ep.row_buffer import RowBuffer, Rows, rows_of

__all__ = ["EPHandle", "ElasticBuffer"]


@dataclass(frozen=True, eq=False)
class EPHandle:
    """What is known of a dispatch; fields are named as in DeepEP.

    `psum_num_recv_tokens_per_scaleup_rank` int32 [ranks]: tokens from each rank and those before it.
    `psum_num_recv_tokens_per_expert` int32 [local experts]: where the rows of each expert end when expanded,
    before its padding; the next one's begin at the next multiple of `expert_alignment`.
    `num_recv_tokens_per_expert_list`: rows of each local expert, padding included;
    `num_unaligned_recv_tokens_per_expert` int32: without. `recv_src_metadata` int64 [rows, 1]: source rank *
    max tokens + source token, -1 in gaps.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    num_recv_tokens: int
    routed: Routed


class ElasticBuffer(RowBuffer):
    """One interface for few tokens and for many, expanded or not; on one host, as `Buffer` is.

    Rows always come in order of source rank and token, so every dispatch is deterministic. Where DeepEP has
    no word for it, `owners`, `active_ranks`, time limits and errors are those of `Buffer`;
    `num_cpu_timeout_secs` is the limit of calls that name none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = True,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        owners: ExpertOwners | None = None,
    ) -> None:
        super().__init__(group, owners)
        # Memory is taken as it is used; the sizes are kept for those who ask.
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, num_max_tokens_per_rank
        self._timeout_us = num_cpu_timeout_secs * 1_000_000

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8: bool = False,
    ) -> int:
        """Bytes of shared memory that a rank's dispatches and combines use at most."""
        ranks = dist.get_world_size(group)
        sent = num_max_tokens_per_rank * hidden * (1 if use_fp8 else 2)
        return 2 * (sent + ranks * num_max_tokens_per_rank * hidden * 2 * max(num_topk, 1))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Hosts, and ranks of each: one host has all."""
        return 1, self.group_size

    def get_logical_domain_size(self) -> tuple[int, int]:
        """The same: rows go from rank to rank in one step."""
        return 1, self.group_size

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = False
    ) -> None:
        """Wait until every rank of the group has come here."""
        dist.barrier(self.group)

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = None,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send tokens to the ranks (or with `do_expand` to the experts) that they chose.

        `x` and `topk_idx`, `topk_weights` are as for `Buffer.dispatch`; so is what comes back without
        `do_expand`. With it there is a row for every (token, expert), grouped by local expert; each group is
        padded with rows of zeros to `expert_alignment`, no indices are returned, and weights are float32
        [rows]. With the `handle` of a dispatch before, `topk_idx` is left out and rows go where its rows
        went. `cumulative_local_expert_recv_stats` int [local experts] is increased by the rows received.

        Scales are in columns with `use_tma_aligned_col_major_sf`. Padding is always zero. What tunes a GPU's
        kernels and orders its streams is taken and changes nothing on a CPU.
        """
        if handle is not None:
            do_expand, alignment = handle.do_expand, handle.expert_alignment
            most = handle.num_max_tokens_per_rank
        else:
            alignment = expert_alignment or 1
            tokens = len(x[0] if isinstance(x, tuple) else x)
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank or tokens
        got = self._dispatch_rows(
            x, topk_idx, topk_weights, num_experts, active_ranks, self._limit_us(timeout_us),
            handle=None if handle is None else handle.routed,
            alignment=alignment if do_expand else 0,
        )  # fmt: skip
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats.add_(got.per_expert.to(cumulative_local_expert_recv_stats))
        made = _handle_of(got, do_expand, alignment, most)
        if handle is not None:
            made = replace(made, routed=handle.routed)
        if got.scales is not None and use_tma_aligned_col_major_sf:
            got = replace(got, scales=got.scales.t().contiguous().t())
        return rows_of(got), got.topk_idx, got.topk_weights, made, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back and add them in float32: after the bias, ranks ascending, or choices in top-k
        order.

        `x` [rows, hidden] and `topk_weights` are as `dispatch` gave them. Returns [tokens, hidden], weights
        [tokens, topk] as they were sent (of choices that came back) or None, and an event.
        """
        out, sums = self._combine_rows(
            x, handle.routed, topk_weights, bias, active_ranks, self._limit_us(timeout_us)
        )
        return out, sums, EventOverlap()

    def _limit_us(self, timeout_us: int | None) -> int:
        return self._timeout_us if timeout_us is None else timeout_us


def _handle_of(got: Gathered, do_expand: bool, alignment: int, most: int) -> EPHandle:
    counts = got.per_expert.tolist()
    ends, end = [], 0
    for count in counts:
        end = -(-end // alignment) * alignment + count
        ends.append(end)
    sources = got.source_rank[got.source_rank >= 0]
    per_rank = torch.bincount(sources, minlength=got.routed.owners.num_ranks)
    metadata = torch.where(got.source_rank < 0, -1, got.source_rank * most + got.source_token)
    return EPHandle(
        do_expand=do_expand,
        num_experts=got.routed.owners.num_experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=most,
        num_sms=0,
        topk_idx=got.routed.topk_idx,
        psum_num_recv_tokens_per_scaleup_rank=per_rank.cumsum(0).int(),
        psum_num_recv_tokens_per_expert=torch.tensor(ends, dtype=torch.int32),
        num_recv_tokens_per_expert_list=[-(-count // alignment) * alignment for count in counts],
        num_unaligned_recv_tokens_per_expert=got.per_expert.int(),
        recv_src_metadata=metadata[:, None],
        num_recv_tokens=len(got.x),
        routed=got.routed,
    )
