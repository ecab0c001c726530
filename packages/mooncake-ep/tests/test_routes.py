"""Routes go to live replicas, by turns, and flip at once when a rank is gone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_ep import PlacementError, RouteTable, RoutingError


@given(st.integers(0, 10**6), st.lists(st.booleans(), min_size=3, max_size=3))
def test_every_choice_goes_to_a_live_slot_of_its_expert(seed: int, lives: list[bool]) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = RouteTable.of(torch.randint(-1, 5, (9,), generator=generator), (2, 4, 3), 5)
    for rank, is_live in enumerate(lives):
        table = table if is_live else table.without(rank)
    topk_idx = torch.randint(-1, 5, (16, 3), generator=generator)
    routed = table.route(topk_idx)
    for wanted, slot in zip(topk_idx.flatten().tolist(), routed.flatten().tolist(), strict=True):
        if slot == -1:
            assert wanted == -1 or wanted in table.lost_experts
        else:
            assert table.expert_of_slot[slot] == wanted
            assert lives[table.owners.owner_of[slot]]


def test_replicas_take_tokens_by_turns() -> None:
    table = RouteTable.of(torch.tensor([0, 1, 0, 0]), (1, 1, 2), 2)
    assert table.route(torch.zeros(6, 1, dtype=torch.int64)).flatten().tolist() == [0, 2, 3, 0, 2, 3]


def test_no_token_is_dropped_when_each_expert_has_two_owners() -> None:
    table = RouteTable.of(torch.tensor([0, 1, 1, 2, 2, 0]), (2, 2, 2), 3)
    topk_idx = torch.tensor([[0, 1], [1, 2], [2, 0]])
    for rank in range(3):
        flipped = table.without(rank)
        assert (flipped.route(topk_idx) >= 0).all()
        assert torch.equal(flipped.with_rank(rank).route(topk_idx), table.route(topk_idx))


def test_lost_experts_are_named() -> None:
    table = RouteTable.of(torch.tensor([0, 1]), (1, 1), 2).without(1)
    assert table.lost_experts == (1,)
    assert table.route(torch.tensor([[0, 1]])).tolist() == [[0, -1]]
    assert table.without(0).route(torch.tensor([[0, 1]])).tolist() == [[-1, -1]]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlacementError, match="must be of 3 slots"):
        RouteTable.of(torch.tensor([0, 1]), (1, 2), 2)
    with pytest.raises(PlacementError, match="holds expert 5 of 2"):
        RouteTable.of(torch.tensor([0, 5]), (1, 1), 2)
    table = RouteTable.of(torch.tensor([0, 1]), (1, 1), 2)
    with pytest.raises(PlacementError, match="rank 2"):
        table.without(2)
    with pytest.raises(RoutingError, match="from 0 to 2"):
        table.route(torch.tensor([[0, 2]]))
    with pytest.raises(RoutingError, match="must be int64"):
        table.route(torch.tensor([[0.0]]))
