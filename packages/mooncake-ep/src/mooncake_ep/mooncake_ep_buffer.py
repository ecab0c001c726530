"""`Buffer` with the interface of the module of this name in the Mooncake wheel: the low-latency mode by
shorter names."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mooncake_ep import buffer as deepep
from mooncake_ep.events import EventOverlap
from mooncake_ep.exchange.handle import Handle

__all__ = ["Buffer"]


class Buffer:
    """Dispatch and combine with `active_ranks` and `timeout_us` in every call; see `mooncake_ep.Buffer`."""

    def __init__(
        self, group: dist.ProcessGroup, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False
    ) -> None:
        self._calls = deepep.Buffer(group, num_ep_buffer_bytes)
        self.group, self.rank, self.group_size = group, self._calls.rank, self._calls.group_size

    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of shared memory that calls of these sizes use at most, on one rank."""
        return deepep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    def update_ep_member(self) -> None:
        """Meet the ranks of the group anew; all of them call it together."""
        self._calls.update_ep_member()

    def destroy(self) -> None:
        """Let go of the other ranks' memory."""
        self._calls.destroy()

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        active_ranks: torch.Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[deepep.Received, torch.Tensor, Handle, EventOverlap, deepep.Hook]:
        """As `low_latency_dispatch`."""
        return self._calls.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8=use_fp8,
            return_recv_hook=return_recv_hook,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
        )

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """The memory to write experts' results into for `zero_copy`."""
        return self._calls.get_next_low_latency_combine_buffer(handle)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        handle: Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, deepep.Hook]:
        """As `low_latency_combine`."""
        return self._calls.low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            zero_copy=zero_copy,
            return_recv_hook=return_recv_hook,
            out=out,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
        )
