"""`Buffer`: dispatch and combine between the ranks of a group, with the interface of DeepEP's first
version."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from mooncake_ep._errors import ShapeError
from mooncake_ep.events import EventOverlap
from mooncake_ep.exchange.handle import Handle, Shape
from mooncake_ep.exchange.low_latency import LowLatency, shown_scales
from mooncake_ep.exchange.peers import deadline_of
from mooncake_ep.exchange.rows import check_topk, payload_of
from mooncake_ep.group_buffer import DEFAULT_TIMEOUT_US
from mooncake_ep.layout import ExpertOwners
from mooncake_ep.normal_mode import NormalMode
from mooncake_ep.staging import Staging

__all__ = ["Buffer"]

Hook = Callable[[], None]
Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Buffer(NormalMode):
    """Expert-parallel communication of one rank with the others of `group`, all on one host.

    Bytes go through shared memory and never through the group, which only introduces the ranks to each other:
    any backend of torch.distributed will do. All ranks make their buffers at once, and call the same methods
    in the same order. One thread of a rank uses a buffer. `owners` says which rank has which expert; None:
    equal shares of consecutive experts, or nearly.

    A rank that dies, or does not answer within a call's `timeout_us`, is given up: its tokens do not come,
    what its experts owe is left out, and `active_ranks` says so; nobody waits for it again. Timeouts are in
    microseconds, -1 is for ever; a death is noticed at once whatever the timeout. After `update_ep_member`,
    which all ranks call together, everybody counts again.

    Raises PeerError when a rank is on another host or cannot be reached.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = True,
        *,
        owners: ExpertOwners | None = None,
    ) -> None:
        super().__init__(group, owners)
        # Memory is taken as it is used; the sizes are kept for those who ask.
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self._low_latency = LowLatency(self._peers, self._dispatches, self._combines)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of shared memory that low-latency calls of these sizes use at most, on one rank."""
        local = -(-num_experts // num_ranks)
        rows = local * num_ranks * num_max_dispatch_tokens_per_rank
        return 2 * (rows + num_max_dispatch_tokens_per_rank) * hidden * 2

    # Low-latency mode

    def low_latency_dispatch(
        self,
        x: Received,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = DEFAULT_TIMEOUT_US,
    ) -> tuple[Received, torch.Tensor, Handle, EventOverlap, Hook]:
        """Send each token of bf16 `x` [tokens, hidden] to the experts of its row in `topk_idx` [tokens,
        topk]. A pair of e4m3 and its scales [tokens, hidden / 128] goes as it is.

        Returns `recv_x` [local experts, ranks * max tokens, hidden], of which the first `recv_count[e]` rows
        of expert e are good: bf16, or with `use_fp8` a pair of e4m3 and its scales, float32 [local experts,
        ranks * max tokens, hidden / 128] in columns; `round_scale` makes them powers of two and `use_ue8m0`
        shows their exponents, four in an int32. Then `recv_count` int32 [local experts], the handle for the
        combine, an event, and a hook. With `return_recv_hook` nothing is received until the hook is called.
        Results are good until the second next dispatch.

        Added to where given: int `cumulative_local_expert_recv_stats` [local experts], tokens received; int64
        `dispatch_wait_recv_cost_stats` [ranks] (or [ranks, ranks], in our row), microseconds waited for each
        rank. `active_ranks` int32 [ranks]: whom to give up beforehand (0), and afterwards who was. Raises
        ShapeError, RoutingError, PlacementError.
        """
        values, scales = x if isinstance(x, tuple) else (x, None)
        use_fp8 = use_fp8 or scales is not None
        shape = Shape(num_max_dispatch_tokens_per_rank, values.shape[-1], num_experts)
        if use_ue8m0 and not (use_fp8 and round_scale and shape.hidden % 512 == 0):
            raise ShapeError("use_ue8m0 needs use_fp8, round_scale and hidden to be a multiple of 512")
        staging = Staging(values.device)
        inside = staging.inward(values)
        payload = payload_of(inside if scales is None else (inside, staging.inward(scales)))
        owners = self._owners(num_experts)
        if payload.x.dtype == torch.float32:
            raise ShapeError(f"x must be bfloat16, not {payload.x.dtype}")
        topk = check_topk(staging.inward(topk_idx), len(values), num_experts).clone()
        self._give_up(active_ranks)
        deadline = deadline_of(timeout_us)
        number = self._low_latency.send(payload, topk, shape, deadline, use_fp8, round_scale)
        result = self._low_latency.prepare(number, topk, shape, owners, use_fp8, values.device)

        def hook() -> None:
            waits_us = [0] * self.group_size
            self._low_latency.receive(
                result, deadline if not return_recv_hook else deadline_of(timeout_us), waits_us
            )
            if use_ue8m0:
                packed.copy_(shown_scales(result.scales, True))
            staging.finish()
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(counts)
            _add_waits(dispatch_wait_recv_cost_stats, waits_us, self.rank)
            self._tell_active(active_ranks)

        counts = staging.mirror(result.counts)
        rows = staging.mirror(result.x, result.counts)
        received: Received = rows
        if use_fp8:
            packed = shown_scales(result.scales, use_ue8m0)
            received = (rows, staging.mirror(packed))
        if not return_recv_hook:
            hook()
        return received, counts, result.handle, EventOverlap(), hook

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """The memory to write experts' results into for `zero_copy`: bf16 [local experts, ranks * max tokens,
        hidden].

        It is good for the next combine. Where the dispatch was of a GPU's tensors, it is on that GPU, and is
        copied all the same.
        """
        target = self._low_latency.combine_buffer(handle, deadline_of(DEFAULT_TIMEOUT_US))
        return Staging(handle.device).mirror(target)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = DEFAULT_TIMEOUT_US,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:
        """Bring experts' results back and add them, times float32 `topk_weights` [tokens, topk], in top-k
        order.

        `x` is of the shape of a dispatch's bf16 `recv_x`; with `zero_copy` it is the memory that
        `get_next_low_latency_combine_buffer` gave, and other ranks read it there. Returns bf16 [tokens,
        hidden] (`out`, where given), an event and a hook as a dispatch does. Choices whose rank is gone add
        nothing. With `use_logfmt`, on all ranks alike, rows travel in the ten bits of `reference_logfmt`.
        """
        if use_logfmt and handle.shape.hidden % 128:
            raise ShapeError(f"use_logfmt needs a multiple of 128 channels, not {handle.shape.hidden}")
        staging = Staging(x.device)
        weights = staging.inward(_checked_weights(topk_idx, topk_weights, handle))
        chosen, shape = staging.inward(topk_idx), (len(topk_idx), handle.shape.hidden)
        combined = torch.empty(shape, dtype=torch.bfloat16, device=x.device) if out is None else out
        if tuple(combined.shape) != shape or combined.dtype != torch.bfloat16 or not combined.is_contiguous():
            raise ShapeError(
                f"out must be contiguous bfloat16 {shape}, not {combined.dtype} {tuple(combined.shape)}"
            )
        sums = combined
        if combined.device.type != "cpu":
            sums = torch.empty(shape, dtype=torch.bfloat16)
            staging.into(combined, sums)
        self._give_up(active_ranks)
        in_place = zero_copy and not staging.copies
        rows = staging.inward(x) if staging.copies else x
        number = self._low_latency.send_results(rows, handle, in_place, use_logfmt, deadline_of(timeout_us))
        owners, deadline = self._owners(handle.shape.num_experts), deadline_of(timeout_us)

        def hook() -> None:
            waits_us = [0] * self.group_size
            until = deadline if not return_recv_hook else deadline_of(timeout_us)
            self._low_latency.receive_results(
                number, chosen, weights, handle, owners, sums, use_logfmt, until, waits_us
            )
            staging.finish()
            _add_waits(combine_wait_recv_cost_stats, waits_us, self.rank)
            self._tell_active(active_ranks)

        if not return_recv_hook:
            hook()
        return combined, EventOverlap(), hook

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing has to be cleaned between modes: rounds are told apart by their numbers."""

    # Who is there

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Give a rank up, or count on it again."""
        self._peers.alive[rank_to_mask] = not mask

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write int32 [ranks]: 1 for ranks that were given up."""
        mask_status.copy_(1 - self._active())

    def low_latency_clean_mask_buffer(self) -> None:
        """Count on every rank again."""
        self._peers.alive = [True] * self.group_size


def _add_waits(stats: torch.Tensor | None, waits_us: list[int], rank: int) -> None:
    if stats is not None:
        (stats if stats.dim() == 1 else stats[rank]).add_(torch.tensor(waits_us, device=stats.device))


def _checked_weights(topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Handle) -> torch.Tensor:
    shape = tuple(handle.topk_idx.shape)
    if (
        tuple(topk_idx.shape) != shape
        or tuple(topk_weights.shape) != shape
        or topk_weights.dtype != torch.float32
    ):
        raise ShapeError(
            f"topk_idx and float32 topk_weights must be {shape} as in the dispatch, "
            f"not {tuple(topk_idx.shape)} and {topk_weights.dtype} {tuple(topk_weights.shape)}"
        )
    return topk_weights.contiguous()
