"""The elastic buffer equals the references in one process, to the bit, expanded or not."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import ElasticBuffer, ExpertOwners, RoutingError, ShapeError, fp8
from mooncake_ep.reference import Tokens, combine, dispatch
from mooncake_ep.reference_expanded import combine_expanded, dispatch_expanded

HIDDEN, TOPK, MOST = 256, 3, 12
TOKENS = (7, 12, 0, 5)


def inputs_of(owners: ExpertOwners) -> list[Tokens]:
    """Different numbers of tokens on every rank, none on one."""
    found = []
    for rank in range(owners.num_ranks):
        generator = torch.Generator().manual_seed(rank)
        tokens = TOKENS[rank]
        topk_idx = torch.rand(tokens, owners.num_experts, generator=generator).argsort(1)[:, :TOPK]
        dropped = torch.rand(tokens, TOPK, generator=generator) < 0.2
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        weights = torch.rand(tokens, TOPK, generator=generator)
        found.append(Tokens(x, topk_idx.masked_fill(dropped, -1).contiguous(), weights))
    return found


OWNERS = [ExpertOwners.even(6, 2), ExpertOwners((3, 0, 0, 1, 3, 3, 2), 4)]


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("biases", [0, 1, 2])
def test_expanded_rows_and_sums_equal_the_reference(
    ranks: Any, owners: ExpertOwners, alignment: int, biases: int
) -> None:
    inputs = inputs_of(owners)
    expected = dispatch_expanded(inputs, owners, alignment)
    bias = [torch.randn(MOST, HIDDEN).bfloat16() for _ in range(biases)]
    outputs = [rows * 3 for rows, _ in expected]
    sums = combine_expanded(outputs, [places for _, places in expected], inputs, bias)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer, mine = ElasticBuffer(group, owners=owners), inputs[rank]
        rows, places = expected[rank]
        stats = torch.zeros(len(owners.experts_of(rank)), dtype=torch.int32)
        handle = None
        for number in range(3):
            asked = {} if handle else {"topk_idx": mine.topk_idx, "num_experts": owners.num_experts}
            x, none_idx, weights, handle, _ = buffer.dispatch(
                mine.x, topk_weights=mine.topk_weights, cumulative_local_expert_recv_stats=stats,
                num_max_tokens_per_rank=MOST, expert_alignment=alignment, handle=handle, do_expand=True,
                **asked,
            )  # fmt: skip
            assert none_idx is None
            assert torch.equal(x, rows), number
            sent = [
                0.0 if place is None else float(inputs[place[0]].topk_weights[place[1:]]) for place in places
            ]
            assert weights is not None
            assert weights.tolist() == sent
            source = [-1 if place is None else place[0] * MOST + place[1] for place in places]
            assert handle.recv_src_metadata.flatten().tolist() == source
            check_counts(handle, stats, number + 1, places)
            out, out_weights, _ = buffer.combine(
                x * 3, handle, weights, tuple(one[: len(mine.x)] for one in bias)
            )
            assert torch.equal(out, sums[rank])
            assert out_weights is not None
            assert torch.equal(out_weights, mine.topk_weights.masked_fill(mine.topk_idx < 0, 0))
        dist.barrier(group)

    ranks(owners.num_ranks, work)


def check_counts(handle: Any, stats: torch.Tensor, calls: int, places: list[Any]) -> None:
    """What DeepEP's own test asks of a handle."""
    start = 0
    for local, padded in enumerate(handle.num_recv_tokens_per_expert_list):
        end = int(handle.psum_num_recv_tokens_per_expert[local])
        assert end - start == int(handle.num_unaligned_recv_tokens_per_expert[local])
        assert int(stats[local]) == calls * (end - start)
        assert None not in places[start:end]
        assert set(places[end : start + padded]) <= {None}
        start += padded
    assert start == len(places) == handle.num_recv_tokens


@pytest.mark.parametrize("owners", OWNERS)
def test_plain_rows_and_sums_equal_the_reference(ranks: Any, owners: ExpertOwners) -> None:
    inputs = inputs_of(owners)
    expected = dispatch(inputs, owners)
    sums = combine([one.x for one in expected], expected, [len(one.x) for one in inputs])

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer, mine, wanted = ElasticBuffer(group, owners=owners), inputs[rank], expected[rank]
        (values, scales), _, _, handle, _ = buffer.dispatch(
            fp8.quantize(mine.x), mine.topk_idx, num_experts=owners.num_experts, num_max_tokens_per_rank=MOST
        )
        quantised = fp8.quantize(wanted.x)
        assert torch.equal(values.view(torch.uint8), quantised[0].view(torch.uint8))
        assert torch.equal(scales, quantised[1])
        assert torch.equal(handle.recv_src_metadata[:, 0], wanted.source_rank * MOST + wanted.source_token)
        x, topk_idx, _, handle, _ = buffer.dispatch(mine.x, handle=handle)
        assert torch.equal(x, wanted.x)
        assert topk_idx is not None
        assert torch.equal(topk_idx, wanted.topk_idx)
        assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == len(wanted.x)
        assert torch.equal(buffer.combine(x, handle)[0], sums[rank])
        dist.barrier(group)

    ranks(owners.num_ranks, work)


def test_a_rank_that_dies_is_left_out(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = ElasticBuffer(group)
        active = torch.ones(2, dtype=torch.int32)
        x, topk_idx = torch.ones(1, HIDDEN).bfloat16(), torch.tensor([[0, 1]])
        options = {"active_ranks": active, "timeout_us": -1}
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=2, do_expand=True, **options)
        assert len(rows) == 2
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        out, _, _ = buffer.combine(rows, handle, **options)
        assert (out == 1).all()
        assert active.tolist() == [1, 0]

    ranks(2, work)


def test_what_does_not_fit_is_refused(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = ElasticBuffer(group)
        x, topk_idx = torch.ones(1, HIDDEN), torch.tensor([[0, 1]])
        with pytest.raises(RoutingError, match="needs topk_idx and the number of experts"):
            buffer.dispatch(x, topk_idx)
        _, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=2)
        with pytest.raises(ShapeError, match="the handle is of 1"):
            buffer.dispatch(x, topk_idx, handle=handle)
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 1)

    ranks(1, work)
