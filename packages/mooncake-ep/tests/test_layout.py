"""The layout counts what a plain loop counts, for any owner table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_ep import ExpertOwners, PlacementError, RoutingError, get_dispatch_layout


@st.composite
def owner_tables(draw: st.DrawFn) -> ExpertOwners:
    """Any owner table, uneven ones and ranks without experts among them."""
    num_ranks = draw(st.integers(1, 5))
    owner_of = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=9))
    return ExpertOwners(tuple(owner_of), num_ranks)


@st.composite
def routings(draw: st.DrawFn, num_experts: int) -> list[list[int]]:
    """Rows of distinct experts in any order, some of them dropped."""
    topk = draw(st.integers(1, min(4, num_experts)))
    row = st.permutations(range(num_experts)).flatmap(
        lambda experts: st.lists(st.booleans(), min_size=topk, max_size=topk).map(
            lambda kept: [expert if keep else -1 for expert, keep in zip(experts[:topk], kept, strict=True)]
        )
    )
    return draw(st.lists(row, min_size=1, max_size=8))


@given(st.data())
def test_counts_equal_those_of_a_plain_loop(data: st.DataObject) -> None:
    owners = data.draw(owner_tables())
    rows = data.draw(routings(owners.num_experts))
    layout = get_dispatch_layout(torch.tensor(rows), owners)
    ranks_of = [{owners.owner_of[expert] for expert in row if expert >= 0} for row in rows]
    in_rank = [[rank in ranks for rank in range(owners.num_ranks)] for ranks in ranks_of]
    assert layout.is_token_in_rank.tolist() == in_rank
    assert layout.tokens_per_rank.tolist() == [sum(column) for column in zip(*in_rank, strict=True)]
    chosen = [expert for row in rows for expert in row]
    assert layout.tokens_per_expert.tolist() == [chosen.count(expert) for expert in range(owners.num_experts)]
    assert layout.tokens_per_rank.dtype == layout.tokens_per_expert.dtype == torch.int32


@given(owner_tables())
def test_local_ids_are_places_among_the_experts_of_the_owner(owners: ExpertOwners) -> None:
    for expert, rank in enumerate(owners.owner_of):
        assert owners.experts_of(rank)[owners.local_id_of[expert]] == expert


def test_even_owners_differ_by_at_most_one_expert() -> None:
    assert ExpertOwners.even(7, 3).owner_of == (0, 0, 0, 1, 1, 2, 2)
    assert ExpertOwners.even(2, 3).owner_of == (0, 1)


def test_a_batch_without_tokens_has_a_layout_of_zeros() -> None:
    layout = get_dispatch_layout(torch.empty(0, 2, dtype=torch.int64), ExpertOwners.even(4, 2))
    assert layout.tokens_per_rank.tolist() == [0, 0]
    assert layout.tokens_per_expert.tolist() == [0, 0, 0, 0]
    assert layout.is_token_in_rank.shape == (0, 2)


@pytest.mark.parametrize(
    ("topk_idx", "message"),
    [
        (torch.tensor([[0, 4]]), "token 0 chose expert 4; experts go from 0 to 3"),
        (torch.tensor([[0, 1], [-2, 1]]), "token 1 chose expert -2"),
        (torch.tensor([[3, 3]]), "token 0 chose expert 3 twice"),
        (torch.tensor([0, 1]), r"must be int64 \[tokens, topk\]"),
        (torch.tensor([[0, 1]], dtype=torch.int32), r"not torch\.int32"),
    ],
)
def test_bad_routing_is_refused_with_its_place(topk_idx: torch.Tensor, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        get_dispatch_layout(topk_idx, ExpertOwners.even(4, 2))


@pytest.mark.parametrize(
    ("owner_of", "num_ranks", "message"),
    [
        ((0, 2), 2, "expert 1 is given to rank 2"),
        ((-1,), 2, "expert 0 is given to rank -1"),
        ((), 2, "0 experts over 2 ranks"),
        ((0,), 0, "1 experts over 0 ranks"),
    ],
)
def test_impossible_owner_tables_are_refused(owner_of: tuple[int, ...], num_ranks: int, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        ExpertOwners(owner_of, num_ranks)


def test_experts_cannot_be_spread_over_no_ranks() -> None:
    with pytest.raises(PlacementError, match="over 0 ranks"):
        ExpertOwners.even(4, 0)
