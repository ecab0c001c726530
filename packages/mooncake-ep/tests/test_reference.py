"""Dispatch is an exact permutation and combine an exact weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_ep import ExpertOwners, PlacementError, RoutingError, ShapeError
from mooncake_ep.reference import Received, Tokens, apply_experts, combine, dispatch

HIDDEN = 4


def tokens_of(owners: ExpertOwners, counts: Sequence[int], seed: int, topk: int = 2) -> list[Tokens]:
    """Random tokens of small integers with weights in sixteenths: their float32 sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for count in counts:
        order = torch.rand(count, owners.num_experts, generator=generator).argsort(dim=1)
        dropped = torch.rand(count, topk, generator=generator) < 0.2
        inputs.append(
            Tokens(
                x=torch.randint(-64, 64, (count, HIDDEN), generator=generator).float(),
                topk_idx=order[:, :topk].masked_fill(dropped, -1),
                topk_weights=torch.randint(0, 16, (count, topk), generator=generator).float() / 16,
            )
        )
    return inputs


def run(inputs: Sequence[Tokens], owners: ExpertOwners, scale: Sequence[float]) -> list[torch.Tensor]:
    """Dispatch, multiply by the scale of each (global) expert, combine."""
    received = dispatch(inputs, owners)
    outputs = [
        apply_experts(
            batch, lambda local_id, rows, rank=rank: rows * scale[owners.experts_of(rank)[local_id]]
        )
        for rank, batch in enumerate(received)
    ]
    return combine(outputs, received, [len(tokens.x) for tokens in inputs])


owner_tables = st.integers(1, 4).flatmap(
    lambda ranks: st.lists(st.integers(0, ranks - 1), min_size=2, max_size=8).map(
        lambda owner_of: ExpertOwners(tuple(owner_of), ranks)
    )
)
cases = owner_tables.flatmap(
    lambda owners: st.tuples(
        st.just(owners),
        st.lists(st.integers(0, 6), min_size=owners.num_ranks, max_size=owners.num_ranks),
        st.integers(0, 2**31),
    )
)


@given(cases)
def test_every_choice_arrives_once_at_its_owner(case: tuple[ExpertOwners, list[int], int]) -> None:
    owners, counts, seed = case
    inputs = tokens_of(owners, counts, seed)
    arrived = [
        (source, token, owners.experts_of(rank)[local_id])
        for rank, batch in enumerate(dispatch(inputs, owners))
        for source, token, choices in zip(
            batch.source_rank.tolist(), batch.source_token.tolist(), batch.topk_idx.tolist(), strict=True
        )
        for local_id in choices
        if local_id >= 0
    ]
    sent = [
        (source, token, expert)
        for source, tokens in enumerate(inputs)
        for token, choices in enumerate(tokens.topk_idx.tolist())
        for expert in choices
        if expert >= 0
    ]
    assert sorted(arrived) == sorted(sent)


@given(cases)
def test_rows_are_the_sources_bits_in_order_of_rank_then_token(
    case: tuple[ExpertOwners, list[int], int],
) -> None:
    owners, counts, seed = case
    inputs = tokens_of(owners, counts, seed)
    for rank, batch in enumerate(dispatch(inputs, owners)):
        places = list(zip(batch.source_rank.tolist(), batch.source_token.tolist(), strict=True))
        assert places == sorted(set(places))
        assert (batch.topk_idx >= 0).any(dim=1).all()
        for row, (source, token) in enumerate(places):
            assert torch.equal(batch.x[row], inputs[source].x[token])
        local = len(owners.experts_of(rank))
        assert int(batch.tokens_per_expert(local).sum()) == int((batch.topk_idx >= 0).sum())


@given(cases)
def test_identity_experts_give_x_times_the_sum_of_kept_weights(
    case: tuple[ExpertOwners, list[int], int],
) -> None:
    owners, counts, seed = case
    inputs = tokens_of(owners, counts, seed)
    combined = run(inputs, owners, scale=[1.0] * owners.num_experts)
    for tokens, result in zip(inputs, combined, strict=True):
        kept = tokens.topk_weights.masked_fill(tokens.topk_idx < 0, 0.0).sum(dim=1, keepdim=True)
        assert torch.equal(result, tokens.x * kept)


@given(cases)
def test_placement_does_not_change_an_exact_result(case: tuple[ExpertOwners, list[int], int]) -> None:
    owners, counts, seed = case
    inputs = tokens_of(owners, counts, seed)
    scale = [1.0 + expert for expert in range(owners.num_experts)]
    alone = Tokens(
        *(torch.cat([getattr(one, name) for one in inputs]) for name in ("x", "topk_idx", "topk_weights"))
    )
    whole = run([alone], ExpertOwners((0,) * owners.num_experts, 1), scale)[0]
    assert torch.equal(torch.cat(run(inputs, owners, scale)), whole)


def test_a_token_whose_choices_are_all_dropped_goes_nowhere_and_is_zero() -> None:
    owners = ExpertOwners.even(4, 2)
    dropped = Tokens(torch.ones(1, HIDDEN), torch.tensor([[-1, -1]]), torch.ones(1, 2))
    kept = Tokens(torch.ones(1, HIDDEN), torch.tensor([[0, 3]]), torch.ones(1, 2))
    assert [len(batch.x) for batch in dispatch([dropped, kept], owners)] == [1, 1]
    first, second = run([dropped, kept], owners, scale=[1.0] * 4)
    assert torch.equal(first, torch.zeros(1, HIDDEN))
    assert torch.equal(second, torch.full((1, HIDDEN), 2.0))


def test_a_token_with_two_experts_on_one_rank_is_sent_there_once() -> None:
    owners = ExpertOwners((1, 1, 0), 2)
    one = Tokens(torch.ones(1, HIDDEN), torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.25]]))
    none = Tokens(torch.ones(0, HIDDEN), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    received = dispatch([one, none], owners)
    assert [len(batch.x) for batch in received] == [0, 1]
    assert received[1].topk_idx.tolist() == [[1, 0]]
    assert received[1].tokens_per_expert(2).tolist() == [1, 1]


@pytest.mark.parametrize("owner_of", [(0, 0, 0), (0, 1, 2)], ids=["experts of one rank", "ranks"])
def test_bfloat16_is_added_in_float32_over(owner_of: tuple[int, ...]) -> None:
    # In bfloat16 256 + 1 is 256 again; only a float32 sum, rounded once at its end, gives 258.
    owners = ExpertOwners(owner_of, max(owner_of) + 1)
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    one = Tokens(x, torch.tensor([[0, 1, 2]]), torch.tensor([[256.0, 1.0, 1.0]]))
    none = Tokens(x[:0], torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3))
    inputs = [one, none, none][: owners.num_ranks]
    assert run(inputs, owners, scale=[1.0] * 3)[0].tolist() == [[258.0] * HIDDEN]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(3, HIDDEN)}, ShapeError, "does not hold the 2 tokens"),
        ({"x": torch.ones(2, HIDDEN + 1)}, ShapeError, "differ from those of rank 0"),
        ({"x": torch.ones(2, HIDDEN, dtype=torch.float16)}, ShapeError, "differ from those of rank 0"),
        ({"topk_weights": torch.ones(2, 1)}, ShapeError, "topk_weights must be float32"),
        ({"topk_weights": torch.ones(2, 2, dtype=torch.float64)}, ShapeError, "topk_weights must be float32"),
        ({"topk_idx": torch.full((2, 2), 9)}, RoutingError, "chose expert 9"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    owners = ExpertOwners.even(4, 2)
    first, second = tokens_of(owners, [2, 2], seed=1)
    with pytest.raises(error, match=message):
        dispatch([first, replace(second, **change)], owners)


def test_dispatch_needs_one_input_per_rank() -> None:
    owners = ExpertOwners.even(4, 2)
    with pytest.raises(PlacementError, match="3 inputs for an owner table of 2 ranks"):
        dispatch(tokens_of(owners, [1, 1, 1], seed=1), owners)


def test_combine_refuses_rows_that_were_not_dispatched() -> None:
    owners = ExpertOwners.even(4, 2)
    received: list[Received] = dispatch(tokens_of(owners, [2, 2], seed=1), owners)
    outputs = [batch.x for batch in received]
    with pytest.raises(ShapeError, match="rank 1 returns shape"):
        combine([outputs[0], outputs[1][:-1]], received, [2, 2])
    with pytest.raises(ShapeError, match="1 token counts"):
        combine(outputs, received, [4])
