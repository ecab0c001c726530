"""pplx's and NIXL's own checks of their interfaces, over our buffers."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import ExpertOwners, PeerError, PlacementError, ShapeError, fp8, nixl_ep, pplx

HIDDEN, EXPERTS, TOPK, MOST, SIZE = 256, 6, 3, 10, 2
OWNERS = ExpertOwners.even(EXPERTS, SIZE)


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fewer tokens than there is room for: values, experts and weights."""
    generator = torch.Generator().manual_seed(rank)
    count = MOST - 2 - rank
    indices = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    return x, indices, torch.rand(count, TOPK, generator=generator)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """With rows up to the most, which are not to be looked at."""
    return torch.cat([tensor, tensor[:1].expand(MOST - len(tensor), -1)])


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_pplx_experts_get_the_tokens_that_chose_them_and_the_sums_come_back(
    ranks: Any, eight_bits: bool, apart: bool
) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> bool:
        make = pplx.AllToAll.internode if rank else pplx.AllToAll.intranode
        all_to_all = make(
            MOST, EXPERTS, TOPK, rank, SIZE, 1, HIDDEN,
            HIDDEN if eight_bits else 2 * HIDDEN, 4 * HIDDEN // 128 if eight_bits else 0,
        )  # fmt: skip
        x, indices, weights = tokens_of(rank)
        values, scales = fp8.quantize(x) if eight_bits else (x, None)
        local = EXPERTS // SIZE
        counts = torch.empty(local, dtype=torch.int32)
        rows = torch.zeros(local, MOST * SIZE, HIDDEN, dtype=values.dtype)
        row_scales = torch.zeros(local, MOST * SIZE, HIDDEN // 128) if eight_bits else None
        bound = torch.tensor([len(x)], dtype=torch.uint32)
        asked = padded(indices).to(torch.uint32)
        arguments = (counts, rows, row_scales, values, scales, asked, bound)
        for options in [{"do_recv": False}, {"do_send": False}] if apart else [{}]:
            all_to_all.dispatch(*arguments, **options)
        results = rows.bfloat16() if row_scales is None else fp8.dequantize(rows, row_scales)
        for place, expert in enumerate(OWNERS.experts_of(rank)):
            sent = []
            for source in range(SIZE):
                theirs, chosen, _ = tokens_of(source)
                theirs = fp8.dequantize(*fp8.quantize(theirs)) if eight_bits else theirs
                sent.append(theirs[(chosen == expert).any(1)])
            assert torch.equal(results[place, : int(counts[place])], torch.cat(sent))
        out = torch.full((MOST, HIDDEN), 7.0).bfloat16()
        for options in [{"do_recv": False}, {"do_send": False}] if apart else [{}]:
            all_to_all.combine(out, asked, padded(weights), results * 2, bound, **options)
        went = fp8.dequantize(values, scales) if scales is not None else values
        expected = went.float() * 2 * weights.sum(1, keepdim=True)
        torch.testing.assert_close(out[: len(x)].float(), expected, rtol=1e-2, atol=1e-2)
        assert (out[len(x) :] == 7).all()
        dist.barrier(group)
        return True

    assert ranks(SIZE, work) == [True, True]


def test_pplx_says_what_it_does_not_take(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> bool:
        with pytest.raises(ShapeError, match="dp_size must be 1"):
            pplx.AllToAll.intranode(MOST, EXPERTS, TOPK, 0, 1, 2, HIDDEN, 2 * HIDDEN, 0)
        with pytest.raises(ShapeError, match="bfloat16 without scales"):
            pplx.AllToAll.intranode(MOST, EXPERTS, TOPK, 0, 1, 1, HIDDEN, 4 * HIDDEN, 0)
        made = pplx.AllToAll.intranode(MOST, EXPERTS, TOPK, 0, 1, 1, HIDDEN, 2 * HIDDEN, 0)
        x, indices, weights = tokens_of(0)
        with pytest.raises(ShapeError, match="nothing was dispatched"):
            made.combine(x, indices, weights, x, None)
        made.destroy()
        return True

    assert ranks(1, work) == [True]


def round_trip(buffer: nixl_ep.Buffer, rank: int, experts: int) -> int:
    """One token to every expert; how much of it came back."""
    topk_idx = torch.arange(experts)[None]
    x = torch.full((1, 128), rank + 1.0).bfloat16()
    received, _, handle, _, _ = buffer.dispatch(x, topk_idx, 4, experts, use_fp8=False)
    target = buffer.get_next_combine_buffer(handle)
    target.copy_(received)
    combined, _, _ = buffer.combine(target, topk_idx, torch.ones(1, experts), handle, zero_copy=True)
    return int(combined[0, 0]) // (rank + 1)


def masks(buffer: nixl_ep.Buffer) -> list[int]:
    status = torch.empty(4, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    return status.tolist()


def test_nixl_ranks_are_connected_disconnected_masked_and_killed(ranks: Any) -> None:
    """As in the plan files of its elastic test: phases with more and with killed ranks; room is for four."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        buffer = nixl_ep.Buffer(rank=rank, group=group, timeout_ms=60_000)
        with pytest.raises(PeerError, match="update_memory_buffers and connect_ranks first"):
            buffer.barrier()
        buffer.update_memory_buffers(4, 2, nixl_ep.Buffer.get_rdma_size_hint(4, 128, 4, 8))
        found: list[Any] = []
        buffer.connect_ranks([0, 1] if rank < 2 else [])
        if rank < 2:
            found.append((masks(buffer), round_trip(buffer, rank, 6)))
            with pytest.raises(PlacementError, match="not the last"):
                buffer.disconnect_ranks([rank, 2])
            with pytest.raises(PlacementError, match="not in the group"):
                buffer.connect_ranks([3])
        else:
            found.append((masks(buffer), round_trip(buffer, rank, 6)))
        buffer.connect_ranks([0, 1, 2])
        found.append((masks(buffer), round_trip(buffer, rank, 6)))
        buffer.barrier()
        rows, _, _, _, handle, _ = buffer.ht_dispatch(
            torch.ones(1, 128), topk_idx=torch.tensor([[0, 5]]), num_tokens_per_expert=torch.zeros(6)
        )
        found.append((len(rows), int(buffer.ht_combine(rows, handle)[0][0, 0])))
        buffer.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer.barrier()
        found.append((masks(buffer), round_trip(buffer, rank, 6)))
        return found

    first, second, third = ranks(3, work)
    assert third is None
    phases = [([0, 0, 1, 1], 4), ([0, 0, 0, 1], 6), ([0, 0, 1, 1], 4)]
    assert [first[0], first[1], first[3]] == phases == [second[0], second[1], second[3]]
    assert (first[2], second[2]) == ((3, 2), (0, 2)), "experts 0 and 5 are those of ranks 0 and 2"
