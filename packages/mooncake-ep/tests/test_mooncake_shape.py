"""Mooncake's own check of its buffer: scaled experts, a rank that dies before the dispatch, stale rows."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep.mooncake_ep_buffer import Buffer

TOKENS, HIDDEN, EXPERTS, TOPK, SIZE = 32, 256, 8, 2, 2


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("fail_rank", [-1, 1])
def test_experts_scale_rows_and_a_dead_rank_is_the_only_inactive_one(
    ranks: Any, use_fp8: bool, fail_rank: int
) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group, Buffer.get_ep_buffer_size_hint(TOKENS, HIDDEN, SIZE, EXPERTS))
        if rank == fail_rank:
            os._exit(1)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
        weights = torch.rand(TOKENS, TOPK, generator=generator)
        active = torch.ones(SIZE, dtype=torch.int32)
        received, _, handle, _, hook = buffer.dispatch(
            x, topk_idx, active, TOKENS, EXPERTS, -1, use_fp8=use_fp8, return_recv_hook=True
        )
        hook()
        rows = received[0].float() * received[1].repeat_interleave(128, 2) if use_fp8 else received.float()
        factors = 1 + 0.1 * (torch.arange(EXPERTS // SIZE) + rank * EXPERTS // SIZE)
        target = buffer.get_next_combine_buffer(handle)
        target.copy_(rows * factors[:, None, None])
        combined, _, _ = buffer.combine(target, topk_idx, weights, active, -1, handle, zero_copy=True)
        assert active.tolist() == [int(one != fail_rank) for one in range(SIZE)]
        lives = (topk_idx // (EXPERTS // SIZE)) != fail_rank
        factor = (weights * (1 + 0.1 * topk_idx)).masked_fill(~lives, 0).sum(1, keepdim=True)
        limits = {"rtol": 0.15, "atol": 5e-3} if use_fp8 else {"rtol": 5e-2, "atol": 1e-3}
        torch.testing.assert_close(combined.float(), x.float() * factor, **limits)
        if fail_rank < 0:
            dist.barrier(group)

    ranks(SIZE, work)
