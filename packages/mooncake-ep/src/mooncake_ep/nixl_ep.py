"""`Buffer` with the interface of NIXL EP: ranks are connected and disconnected one by one.

All ranks that are in the group call `connect_ranks` together, also those that connect to nobody. With a group
of `mooncake_ep.pg`, ranks may come and go; a plain group has a fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mooncake_ep import buffer as deepep
from mooncake_ep._errors import PeerError, PlacementError
from mooncake_ep.exchange.handle import Handle

__all__ = ["Buffer"]


class Buffer:
    """Dispatch and combine of one rank among those that it is connected to.

    `update_memory_buffers` comes first, then `connect_ranks`. A rank that is not connected, or masked, or
    that does not answer within `timeout_ms`, is left out. A store alone, without `group`, does not do.
    """

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: dist.ProcessGroup | None = None,
        comm: object | None = None,
        tcp_store_group: object | None = None,
        timeout_ms: int = 30_000,
    ) -> None:
        of = dist.group.WORLD if group is None and dist.is_initialized() else group
        if of is None:
            raise PeerError(
                "ranks meet over a group of torch.distributed: give group, or make the default one"
            )
        self.group, self.rank, self.group_size = of, dist.get_rank(of), 0
        self.low_latency_mode = low_latency_mode
        self._timeout_us = timeout_ms * 1000
        self._connected: list[int] = []
        self._calls_or_none: deepep.Buffer | None = None

    @staticmethod
    def get_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of shared memory that calls of these sizes use at most, on one rank."""
        return deepep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    @property
    def _calls(self) -> deepep.Buffer:
        if self._calls_or_none is None:
            raise PeerError("call update_memory_buffers and connect_ranks first")
        return self._calls_or_none

    # Who is there

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int = 0, num_nvl_bytes: int = 0
    ) -> None:
        """Have room for `num_ranks`; nobody is connected yet. Memory is taken as it is used.

        Raises PlacementError when the group has more ranks.
        """
        met = dist.get_world_size(self.group)
        if met > num_ranks:
            raise PlacementError(f"the group has {met} ranks, more than {num_ranks}")
        self.group_size, self.num_experts_per_rank = num_ranks, num_experts_per_rank
        self._connected, self._calls_or_none = [self.rank], None

    def connect_ranks(self, remote_ranks: Sequence[int], activate: bool = True) -> None:
        """Count on ranks from now on. All ranks of the group meet in it anew; handles from before are void.

        `activate` False: new ones stay masked until `update_mask_buffer(rank, False)`. Raises PlacementError
        for ranks that the group does not have.
        """
        size = dist.get_world_size(self.group)
        strangers = [rank for rank in remote_ranks if not 0 <= rank < min(size, self.group_size)]
        if strangers:
            raise PlacementError(
                f"ranks {strangers} are not in the group, or beyond {self.group_size} places"
            )
        masked: list[int] = []
        if self._calls_or_none is None:
            self._calls_or_none = deepep.Buffer(self.group)
        else:
            status = torch.empty(self._calls.group_size, dtype=torch.int32)
            self._calls.low_latency_query_mask_buffer(status)
            masked = [rank for rank in self._connected if status[rank] and rank not in remote_ranks]
            self._calls.update_ep_member()
        new = sorted(rank for rank in set(remote_ranks) if rank not in self._connected)
        self._connected += new
        self._mask_strangers(masked if activate else [*masked, *new])

    def disconnect_ranks(self, remote_ranks: Sequence[int]) -> None:
        """Leave out ranks that were connected last. Raises PlacementError for others."""
        tail = self._connected[len(self._connected) - len(remote_ranks) :]
        if sorted(tail) != sorted(remote_ranks):
            raise PlacementError(
                f"ranks {list(remote_ranks)} are not the last of those connected: {self._connected}"
            )
        del self._connected[len(self._connected) - len(remote_ranks) :]
        for rank in remote_ranks:
            self._calls.low_latency_update_mask_buffer(rank, True)

    def _mask_strangers(self, masked: Sequence[int]) -> None:
        for rank in range(self._calls.group_size):
            if rank not in self._connected or rank in masked:
                self._calls.low_latency_update_mask_buffer(rank, True)

    def set_tcp_store_group(self, tcp_store_group: object | None) -> None:
        """Nothing: ranks meet over the group."""

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out, or count on it again."""
        self._calls.low_latency_update_mask_buffer(rank_to_mask, mask)

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write int32 [num_ranks]: 1 for ranks that are left out, those that are not there among them."""
        status = torch.ones(self.group_size, dtype=torch.int32)
        self._calls.low_latency_query_mask_buffer(status[: self._calls.group_size])
        mask_status.copy_(status)

    def clean_mask_buffer(self) -> None:
        """Count on every connected rank again."""
        self._calls.low_latency_clean_mask_buffer()
        self._mask_strangers([])

    def clean_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing has to be cleaned between modes: rounds are told apart by their numbers."""

    def barrier(self) -> None:
        """Wait for every rank that counts; who does not come within the timeout is left out."""
        nothing = torch.empty(0, 128, dtype=torch.bfloat16)
        topk_idx = torch.empty(0, 1, dtype=torch.int64)
        self.dispatch(nothing, topk_idx, 1, self._calls.group_size, use_fp8=False)

    def destroy(self) -> None:
        """Let go of the other ranks' memory."""
        self._calls.destroy()

    # Calls, as `mooncake_ep.Buffer` has them

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """As `mooncake_ep.Buffer.low_latency_dispatch`."""
        kwargs.setdefault("timeout_us", self._timeout_us)
        return self._calls.low_latency_dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """As `mooncake_ep.Buffer.low_latency_combine`."""
        kwargs.setdefault("timeout_us", self._timeout_us)
        return self._calls.low_latency_combine(*args, **kwargs)

    low_latency_dispatch, low_latency_combine = dispatch, combine

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """The memory to write experts' results into for `zero_copy`."""
        return self._calls.get_next_low_latency_combine_buffer(handle)

    def get_dispatch_layout(self, *args: Any, **kwargs: Any) -> Any:
        """As `mooncake_ep.Buffer.get_dispatch_layout`."""
        return self._calls.get_dispatch_layout(*args, **kwargs)

    def ht_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """As `mooncake_ep.Buffer.dispatch`."""
        kwargs.setdefault("timeout_us", self._timeout_us)
        return self._calls.dispatch(*args, **kwargs)

    def ht_combine(self, *args: Any, **kwargs: Any) -> Any:
        """As `mooncake_ep.Buffer.combine`."""
        kwargs.setdefault("timeout_us", self._timeout_us)
        return self._calls.combine(*args, **kwargs)
