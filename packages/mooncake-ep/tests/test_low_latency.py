"""DeepEP's published checks of the low-latency mode, with ranks in processes of their own."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import Buffer, ExpertOwners, ShapeError, reference_fp8, reference_low_latency
from mooncake_ep.reference import Tokens

MAX_TOKENS, HIDDEN, TOPK = 16, 512, 3


def routing(
    rank: int, experts: int, seed: int, tokens: int = MAX_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts for each token, ten choices dropped, and weights."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    topk_idx = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :TOPK].contiguous()
    for _ in range(10):
        token, choice = (int(torch.randint(0, n, (1,), generator=generator)) for n in (tokens, TOPK))
        topk_idx[token, choice] = -1
    return topk_idx, torch.rand(tokens, TOPK, generator=generator)


def telling_rows(rank: int, tokens: int = MAX_TOKENS) -> torch.Tensor:
    """Rows that prove where they come from: the rank everywhere, and the token in the last 128 channels."""
    x = torch.full((tokens, HIDDEN), float(rank + 1), dtype=torch.bfloat16)
    x[:, -128:] = torch.arange(tokens, dtype=torch.bfloat16)[:, None]
    return x


def received_rows(received: Any) -> torch.Tensor:
    """Rows as bf16, whatever they were sent as."""
    return reference_fp8.dequantize(*received) if isinstance(received, tuple) else received


def check_received(
    rows: torch.Tensor, counts: torch.Tensor, handle: Any, owners: ExpertOwners, rank: int, seed: int
) -> None:
    """Every row is where its rank and token say, and every choice has a row."""
    all_topk = [routing(source, owners.num_experts, seed)[0] for source in range(owners.num_ranks)]
    for local, expert in enumerate(owners.experts_of(rank)):
        assert int(counts[local]) == sum(int((topk == expert).sum()) for topk in all_topk)
        seen = 0
        for source, topk in enumerate(all_topk):
            begin, count = divmod(int(handle.layout_range[local, source]), 1 << 32)
            assert begin == seen
            chosen = (topk == expert).any(dim=1).nonzero().flatten()
            assert handle.src_info[local, begin : begin + count].tolist() == chosen.tolist()
            part = rows[local, begin : begin + count]
            assert (part[:, :-128] == source + 1).all()
            assert torch.equal(part[:, -1].float().round().int(), chosen.int())
            seen += count
        assert seen == int(counts[local])


@pytest.mark.parametrize(("size", "experts"), [(2, 6), (4, 10), (4, 3)])
@pytest.mark.parametrize("mode", ["bf16", "fp8", "rounded", "ue8m0"])
def test_rows_counts_and_sums_are_those_of_deepeps_checks(
    ranks: Any, size: int, experts: int, mode: str
) -> None:
    owners = ExpertOwners.even(experts, size)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        options = {"use_fp8": mode != "bf16", "round_scale": mode in {"rounded", "ue8m0"}}
        for seed, hook_wanted in ((1, False), (2, True), (3, False)):
            topk_idx, weights = routing(rank, experts, seed)
            x = telling_rows(rank)
            stats = torch.zeros(len(owners.experts_of(rank)), dtype=torch.int32)
            received, counts, handle, _, hook = buffer.low_latency_dispatch(
                x, topk_idx, MAX_TOKENS, experts, stats, use_ue8m0=mode == "ue8m0",
                return_recv_hook=hook_wanted, **options,
            )  # fmt: skip
            if hook_wanted:
                hook()
            if mode == "ue8m0":
                received = (received[0], reference_fp8.unpack_ue8m0(received[1]))
            rows = received_rows(received)
            check_received(rows, counts, handle, owners, rank, seed)
            assert torch.equal(stats, counts)
            target = rows
            if seed == 3:
                target = buffer.get_next_low_latency_combine_buffer(handle)
                target.copy_(rows)
            combined, _, hook = buffer.low_latency_combine(
                target, topk_idx, weights, handle, zero_copy=seed == 3, return_recv_hook=hook_wanted
            )
            if hook_wanted:
                hook()
            kept = weights.masked_fill(topk_idx == -1, 0).sum(1, keepdim=True)
            assert difference(combined, x.float() * kept) < (1e-5 if mode == "bf16" else 9e-4)
        dist.barrier(group)

    ranks(size, work)


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepEP's measure: one minus the cosine of both, moved by 1."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def serve(rows: torch.Tensor, owners: ExpertOwners, rank: int) -> torch.Tensor:
    """What the experts of a rank make of their rows."""
    factors = torch.tensor([1.0 + expert for expert in owners.experts_of(rank)])
    return (rows.float() * factors[:, None, None]).bfloat16()


def inputs_of(owners: ExpertOwners, seed: int) -> list[Tokens]:
    """What every rank dispatches."""
    found = []
    for rank in range(owners.num_ranks):
        x = torch.randn(MAX_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
        found.append(Tokens(x, *routing(rank, owners.num_experts, seed)))
    return found


def expected_sums(inputs: list[Tokens], owners: ExpertOwners, dead: tuple[int, ...] = ()) -> list[Any]:
    """What each rank gets back."""
    packed = reference_low_latency.dispatch(inputs, owners, MAX_TOKENS)
    outputs = [serve(batch.x, owners, rank) for rank, batch in enumerate(packed)]
    return reference_low_latency.combine(outputs, packed, inputs, owners, dead)


@pytest.mark.parametrize("mode", ["bf16", "fp8", "rounded"])
@pytest.mark.parametrize("owners", [ExpertOwners((0, 1, 1, 0, 1, 1, 1), 2), ExpertOwners.even(6, 3)])
def test_rows_and_sums_equal_the_reference_to_the_bit_and_are_the_same_twenty_times(
    ranks: Any, owners: ExpertOwners, mode: str
) -> None:
    inputs, options = inputs_of(owners, 5), {"use_fp8": mode != "bf16", "round_scale": mode == "rounded"}
    expected = reference_low_latency.dispatch(inputs, owners, MAX_TOKENS, **options)
    outputs = [
        serve(received_rows((batch.x, batch.scales) if batch.scales is not None else batch.x), owners, rank)
        for rank, batch in enumerate(expected)
    ]
    sums = reference_low_latency.combine(outputs, expected, inputs, owners)

    def work(rank: int, group: dist.ProcessGroup) -> set[str]:
        buffer, mine, wanted = Buffer(group, owners=owners), inputs[rank], expected[rank]
        seen = set()
        for _ in range(20):
            received, counts, handle, _, _ = buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, MAX_TOKENS, owners.num_experts, **options
            )
            parts = received if isinstance(received, tuple) else (received,)
            there = torch.arange(parts[0].shape[1]) < counts[:, None]
            for part, reference in zip(parts, (wanted.x, wanted.scales), strict=False):
                assert reference is not None
                assert torch.equal(part[there].view(torch.uint8), reference[there].view(torch.uint8))
            assert torch.equal(counts, wanted.counts)
            assert torch.equal(handle.layout_range, wanted.layout_range)
            assert torch.equal(handle.src_info, wanted.src_info)
            results = serve(received_rows(received), owners, rank).masked_fill(~there[..., None], 0)
            combined, _, _ = buffer.low_latency_combine(results, mine.topk_idx, mine.topk_weights, handle)
            assert torch.equal(combined, sums[rank])
            told = [*(part[there] for part in parts), combined]
            whole = b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in told)
            seen.add(hashlib.sha256(whole).hexdigest())
        dist.barrier(group)
        return seen

    assert all(len(seen) == 1 for seen in ranks(owners.num_ranks, work))


DYING = {1: "dispatch", 3: "combine", 5: "clean"}


def test_ranks_that_die_at_dispatch_combine_and_clean_are_masked_as_deepeps_shrink_test_has_it(
    ranks: Any,
) -> None:
    """Six ranks, of which one dies in each of three phases; the masks of survivors are what was to be."""
    owners = ExpertOwners.even(12, 6)
    inputs = inputs_of(owners, 6)

    def work(rank: int, group: dist.ProcessGroup) -> list[list[int]]:
        buffer, mine, dead, seen = Buffer(group), inputs[rank], [], []

        def phase(name: str) -> None:
            if DYING.get(rank) == name:
                os.kill(os.getpid(), signal.SIGKILL)
            dead.extend(one for one, when in DYING.items() if when == name)

        def round_trip(*, dies: str = "") -> torch.Tensor:
            received, counts, handle, _, _ = buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, MAX_TOKENS, 12, use_fp8=False, timeout_us=-1
            )
            from_dead = handle.layout_range[:, dead] & 0xFFFFFFFF
            assert not from_dead.any(), "no token of the dead comes"
            results = serve(received, owners, rank)
            phase(dies)
            combined, _, _ = buffer.low_latency_combine(
                results, mine.topk_idx, mine.topk_weights, handle, timeout_us=-1
            )
            assert torch.equal(combined, expected_sums(inputs, owners, tuple(dead))[rank])
            return counts

        def mask() -> None:
            status = torch.full((6,), -1, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(one in dead) for one in range(6)]
            seen.append(status.tolist())

        phase("dispatch")
        round_trip()
        mask()
        round_trip(dies="combine")
        mask()
        phase("clean")
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, 12)
        mask_before = list(dead)
        round_trip()
        assert mask_before == [1, 3, 5]
        mask()
        return seen

    found = ranks(6, work)
    assert [one is None for one in found] == [False, True, False, True, False, True]
    masked = [[0, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 1]]
    assert found[0] == found[2] == found[4] == masked


def test_masks_of_the_callers_are_their_own_and_can_be_lifted(ranks: Any) -> None:
    owners = ExpertOwners.even(4, 2)
    inputs = inputs_of(owners, 7)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer, mine = Buffer(group), inputs[rank]
        other = 1 - rank
        status = torch.zeros(2, dtype=torch.int32)

        def sums() -> torch.Tensor:
            received, _, handle, _, _ = buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, MAX_TOKENS, 4, use_fp8=False
            )
            results = serve(received, owners, rank)
            return buffer.low_latency_combine(results, mine.topk_idx, mine.topk_weights, handle)[0]

        buffer.low_latency_update_mask_buffer(other, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(one == other) for one in range(2)]
        assert torch.equal(sums(), expected_sums(inputs, owners, (other,))[rank])
        dist.barrier(group)
        buffer.low_latency_update_mask_buffer(other, False)
        assert torch.equal(sums(), expected_sums(inputs, owners)[rank])
        buffer.low_latency_update_mask_buffer(other, True)
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(status)
        assert not status.any()
        dist.barrier(group)

    ranks(2, work)


@pytest.mark.parametrize("dies_before", ["dispatch", "combine"])
def test_a_rank_that_dies_is_masked_and_its_experts_add_nothing(ranks: Any, dies_before: str) -> None:
    size, experts = 3, 7
    owners = ExpertOwners.even(experts, size)
    inputs = inputs_of(owners, 4)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        x, topk_idx, weights = inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights
        for number in range(3):
            active = torch.ones(size, dtype=torch.int32)
            if rank == 1 and number == 1 and dies_before == "dispatch":
                os.kill(os.getpid(), signal.SIGKILL)
            received, counts, handle, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, MAX_TOKENS, experts, use_fp8=False, active_ranks=active, timeout_us=-1
            )
            if rank == 1 and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            combined, _, _ = buffer.low_latency_combine(
                serve(received, owners, rank), topk_idx, weights, handle, active_ranks=active, timeout_us=-1
            )
            gone = number >= 1
            assert active.tolist() == [1, int(not gone), 1]
            assert torch.equal(combined, expected_sums(inputs, owners, (1,) if gone else ())[rank]), number
            if number == 2:
                sources = handle.layout_range[:, 1] & 0xFFFFFFFF
                assert not sources.any()
                assert counts.sum() > 0
        masked = torch.zeros(size, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(masked)
        assert masked.tolist() == [0, 1, 0]

    assert len(ranks(size, work)) == size


def test_a_rank_that_is_late_is_masked_and_its_old_rows_are_not_read(ranks: Any) -> None:
    experts = 4

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        topk_idx = torch.tensor([[0, 2]])
        for number in (1.0, 2.0):
            x = torch.full((1, HIDDEN), number, dtype=torch.bfloat16)
            active = torch.ones(2, dtype=torch.int32)
            timeout_us = -1 if number == 1 else 5000
            if rank == 1 and number == 2:
                dist.barrier(group)  # rank 0 has given up by now
                break
            received, _, handle, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, 4, experts, use_fp8=False, active_ranks=active, timeout_us=timeout_us
            )
            combined, _, _ = buffer.low_latency_combine(
                received, topk_idx, torch.ones(1, 2), handle, active_ranks=active, timeout_us=timeout_us
            )
            if number == 2:
                assert active.tolist() == [1, 0]
                assert (combined == 2).all()  # of its own expert alone; round one's rows were 1
                dist.barrier(group)
            else:
                assert (combined == 2).all()
                dist.barrier(group)
        buffer.update_ep_member()
        received, counts, _, _, _ = buffer.low_latency_dispatch(
            torch.full((1, HIDDEN), 7.0, dtype=torch.bfloat16), topk_idx, 4, experts, use_fp8=False
        )
        assert counts.tolist() == [2, 0]
        assert (received[0, :2] == 7).all()
        dist.barrier(group)

    ranks(2, work)


def test_waits_are_counted_for_each_rank_and_results_of_two_rounds_are_apart(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        topk_idx = torch.tensor([[0], [1]])
        waits = torch.zeros(2, 2, dtype=torch.int64)
        kept = []
        for number in range(2):
            x = torch.full((2, HIDDEN), float(number + 1), dtype=torch.bfloat16)
            received, _, _, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, 2, 2, dispatch_wait_recv_cost_stats=waits, use_fp8=False
            )
            kept.append(received)
        assert (kept[0][0, :2] == 1).all()
        assert (kept[1][0, :2] == 2).all()
        assert (waits >= 0).all()
        assert not waits[1 - rank].any()
        dist.barrier(group)

    ranks(2, work)


def test_what_does_not_fit_is_refused_before_anything_is_sent(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        x, topk_idx = torch.ones(3, HIDDEN, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
        with pytest.raises(ShapeError, match="more than 2 tokens"):
            buffer.low_latency_dispatch(x, topk_idx, 2, 2)
        with pytest.raises(ShapeError, match="must be bfloat16"):
            buffer.low_latency_dispatch(x.float(), topk_idx, 4, 2)
        with pytest.raises(ShapeError, match="use_ue8m0 needs"):
            buffer.low_latency_dispatch(x, topk_idx, 4, 2, use_ue8m0=True)
        with pytest.raises(ShapeError, match="active_ranks must be int32"):
            buffer.low_latency_dispatch(x, topk_idx, 4, 2, active_ranks=torch.ones(3, dtype=torch.int32))
        received, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, 2, use_fp8=False)
        with pytest.raises(ShapeError, match="as in the dispatch"):
            buffer.low_latency_combine(received, topk_idx, torch.ones(3, 2), handle)
        with pytest.raises(ShapeError, match="zero_copy: x must be"):
            buffer.low_latency_combine(received, topk_idx, torch.ones(3, 1), handle, zero_copy=True)

    ranks(1, work)
