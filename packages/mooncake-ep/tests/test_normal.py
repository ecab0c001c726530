"""The normal mode between processes equals the reference in one process, to the bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import Buffer, ExpertOwners, RoutingError, ShapeError, fp8
from mooncake_ep.reference import Received, Tokens, apply_experts, combine, dispatch

HIDDEN, TOPK = 256, 3
TOKENS = (7, 12, 0, 5)


def inputs_of(owners: ExpertOwners, dtype: torch.dtype = torch.bfloat16) -> list[Tokens]:
    """Different numbers of tokens on every rank, none on one."""
    found = []
    for rank in range(owners.num_ranks):
        generator = torch.Generator().manual_seed(rank)
        tokens = TOKENS[rank]
        topk_idx = torch.rand(tokens, owners.num_experts, generator=generator).argsort(1)[:, :TOPK]
        dropped = torch.rand(tokens, TOPK, generator=generator) < 0.2
        x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
        weights = torch.rand(tokens, TOPK, generator=generator)
        found.append(Tokens(x, topk_idx.masked_fill(dropped, -1).contiguous(), weights))
    return found


def serve(received: Received) -> torch.Tensor:
    """Experts that multiply."""
    return apply_experts(received, lambda local_id, rows: rows * (1 + 0.25 * local_id))


@pytest.mark.parametrize("owners", [ExpertOwners.even(6, 2), ExpertOwners((3, 0, 0, 1, 3, 3, 2), 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dispatch_and_combine_equal_the_reference_to_the_bit(
    ranks: Any, owners: ExpertOwners, dtype: torch.dtype
) -> None:
    inputs = inputs_of(owners, dtype)
    expected = dispatch(inputs, owners)
    outputs = [serve(batch) for batch in expected]
    sums = combine(outputs, expected, [len(one.x) for one in inputs])

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group, owners=owners)
        mine, wanted = inputs[rank], expected[rank]
        experts = owners.num_experts
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, experts)
        assert per_rank.tolist() == in_rank.sum(0).tolist()
        for _ in range(3):
            x, topk_idx, weights, counts, handle, _ = buffer.dispatch(
                mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights,
                num_tokens_per_expert=per_expert,
                expert_alignment=4,
            )  # fmt: skip
            assert torch.equal(x, wanted.x)
            assert topk_idx is not None
            assert torch.equal(topk_idx, wanted.topk_idx)
            assert weights is not None
            assert torch.equal(weights, wanted.topk_weights)
            exact = wanted.tokens_per_expert(len(owners.experts_of(rank))).tolist()
            assert counts == [-(-one // 4) * 4 for one in exact]
            result, result_weights, _ = buffer.combine(serve(wanted), handle, weights)
            assert torch.equal(result, sums[rank])
            kept = mine.topk_weights.masked_fill(mine.topk_idx < 0, 0)
            assert result_weights is not None
            assert torch.equal(result_weights, kept)
            again, none_idx, none_weights, _, _, _ = buffer.dispatch(mine.x * 2, handle=handle)
            assert torch.equal(again, wanted.x * 2)
            assert none_idx is none_weights is None
            bias = torch.ones_like(result)
            biased, _, _ = buffer.combine(torch.zeros_like(wanted.x), handle, bias=(bias, bias))
            assert (biased == 2).all()
        dist.barrier(group)

    ranks(owners.num_ranks, work)


def test_room_for_the_worst_case_changes_nothing_else(ranks: Any) -> None:
    owners = ExpertOwners.even(6, 2)
    inputs = inputs_of(owners)
    expected = dispatch(inputs, owners)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer, mine, wanted = Buffer(group), inputs[rank], expected[rank]
        _, _, per_expert, _, _ = buffer.get_dispatch_layout(mine.topk_idx, 6)
        x, topk_idx, _, counts, handle, _ = buffer.dispatch(
            mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights,
                num_tokens_per_expert=per_expert,
            num_worst_tokens=40,
        )  # fmt: skip
        assert x.shape == (40, HIDDEN)
        assert topk_idx is not None
        assert torch.equal(x[: len(wanted.x)], wanted.x)
        assert (topk_idx[len(wanted.x) :] == -1).all()
        assert counts == []
        result, _, _ = buffer.combine(x, handle)
        assert torch.equal(result, combine([one.x for one in expected], expected, [7, 12])[rank])
        dist.barrier(group)

    ranks(2, work)


def test_fp8_rows_travel_with_their_scales(ranks: Any) -> None:
    owners = ExpertOwners.even(6, 2)
    inputs = inputs_of(owners)
    expected = dispatch(inputs, owners)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer, mine = Buffer(group), inputs[rank]
        _, _, per_expert, _, _ = buffer.get_dispatch_layout(mine.topk_idx, 6)
        received, _, _, _, _, _ = buffer.dispatch(
            fp8.quantize(mine.x), topk_idx=mine.topk_idx, num_tokens_per_expert=per_expert
        )
        values, scales = fp8.quantize(expected[rank].x)
        assert torch.equal(received[0].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(received[1], scales)
        dist.barrier(group)

    ranks(2, work)


def test_a_rank_that_dies_is_left_out_of_both_halves(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        x = torch.full((3, HIDDEN), float(rank + 1))
        topk_idx = torch.tensor([[0, 2], [2, 4], [4, 0]])
        per_expert = torch.zeros(6, dtype=torch.int32)
        active = torch.ones(3, dtype=torch.int32)
        options = {"active_ranks": active, "timeout_us": -1}
        received, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=topk_idx, num_tokens_per_expert=per_expert, **options
        )
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert len(received) == 6
        result, _, _ = buffer.combine(received, handle, **options)
        assert active.tolist() == [1, 0, 1]
        assert result[:, 0].tolist() == [rank + 1, rank + 1, 2 * (rank + 1)]
        received, _, _, _, _, _ = buffer.dispatch(
            x, topk_idx=topk_idx, num_tokens_per_expert=per_expert, **options
        )
        assert received[:, 0].tolist() == [1, 1, 3, 3]

    ranks(3, work)


def test_what_does_not_fit_is_refused_before_anything_is_sent(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        x, topk_idx = torch.ones(2, HIDDEN), torch.tensor([[0], [1]])
        per_expert = torch.zeros(2, dtype=torch.int32)
        with pytest.raises(RoutingError, match="needs topk_idx"):
            buffer.dispatch(x)
        with pytest.raises(RoutingError, match="names expert 2"):
            buffer.dispatch(x, topk_idx=topk_idx + 1, num_tokens_per_expert=per_expert)
        with pytest.raises(ShapeError, match="topk_weights must be float32"):
            buffer.dispatch(x, topk_idx=topk_idx, topk_weights=x, num_tokens_per_expert=per_expert)
        with pytest.raises(ShapeError, match="in CPU memory"):
            buffer.dispatch(x.double(), topk_idx=topk_idx, num_tokens_per_expert=per_expert)
        received, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, num_tokens_per_expert=per_expert)
        with pytest.raises(ShapeError, match="3 tokens, but the handle is of 2"):
            buffer.dispatch(torch.ones(3, HIDDEN), handle=handle)
        with pytest.raises(ShapeError, match="as dispatched"):
            buffer.combine(received[:1], handle)
        with pytest.raises(ShapeError, match="bias must be up to two"):
            buffer.combine(received, handle, bias=torch.ones(2, 3))

    ranks(1, work)
