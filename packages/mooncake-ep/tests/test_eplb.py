"""Placements: DeepSeek's to the letter, and one that moves little and is as even."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mooncake_ep import PlacementError, eplb


def loads(layers: int, experts: int, seed: int) -> torch.Tensor:
    """Loads as skewed as those of real models."""
    return torch.exp(torch.randn(layers, experts, generator=torch.Generator().manual_seed(seed))) * 1000


def copies_needed(before: torch.Tensor, after: torch.Tensor, slots_of_rank: Sequence[int]) -> int:
    """Experts that a rank gets and did not have, however the slots of a rank are ordered."""
    needed = 0
    for old, new in zip(
        before.split(list(slots_of_rank), 1), after.split(list(slots_of_rank), 1), strict=True
    ):
        for held, wanted in zip(old.tolist(), new.tolist(), strict=True):
            for expert in wanted:
                if expert in held:
                    held.remove(expert)
                else:
                    needed += expert >= 0
    return needed


def follow(before: torch.Tensor, plan: eplb.Plan) -> torch.Tensor:
    """The placement that comes of carrying out the moves."""
    after = before.masked_fill(plan.physical_to_logical < 0, -1)
    for layer, expert, source, destination in plan.moves.tolist():
        assert source == -1 or before[layer, source] == expert
        after[layer, destination] = expert
    return after


def test_the_example_of_deepseeks_page_comes_out_to_the_letter() -> None:
    weight = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    slots, slots_of, counts = eplb.rebalance_experts(weight, 16, 4, 2, 8)
    assert slots.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert slots_of.shape == (2, 12, 2)
    assert counts.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    for layer in range(2):
        for expert in range(12):
            held = [slot for slot in slots_of[layer, expert].tolist() if slot >= 0]
            assert sorted(held) == [s for s, e in enumerate(slots[layer].tolist()) if e == expert]


def plain_deepseek(load: list[float], replicas: int, gpus: int) -> list[int]:
    """The global policy of the published algorithm for one layer, in plain loops."""
    expert_of, counts = list(range(len(load))), [1] * len(load)
    for _ in range(replicas - len(load)):
        shares = [one / count for one, count in zip(load, counts, strict=True)]
        hottest = shares.index(max(shares))
        expert_of.append(hottest)
        counts[hottest] += 1
    shares = [load[expert] / counts[expert] for expert in expert_of]
    room = replicas // gpus
    packs: list[list[int]] = [[] for _ in range(gpus)]
    for item in sorted(range(replicas), key=lambda one: -shares[one]) if room > 1 else ():
        free = [pack for pack in packs if len(pack) < room]
        min(free, key=lambda pack: sum(shares[one] for one in pack)).append(item)
    if room == 1:
        packs = [[item] for item in range(replicas)]
    return [expert_of[item] for pack in packs for item in pack]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
def test_the_exact_mode_is_a_plain_loop(gpus: int, room: int, experts: int, seed: int) -> None:
    assume(gpus * room >= experts)
    # Powers of two: their shares and sums are exact, so no rounding decides between packs.
    load = 2.0 ** torch.randint(0, 12, (1, experts), generator=torch.Generator().manual_seed(seed))
    assume(gpus * room <= 2 * experts)
    found, _, counts = eplb.rebalance_experts(load, gpus * room, 5, 3, gpus)
    if not bool(((counts & (counts - 1)) == 0).all()):
        return
    assert found[0].tolist() == plain_deepseek(load[0].tolist(), gpus * room, gpus)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((16, 4, 2, 3), "3 GPUs cannot be divided evenly among 2 nodes"),
        ((15, 4, 2, 8), "15 replicas cannot be divided evenly among 8 GPUs"),
        ((8, 4, 2, 8), "8 replicas are too few for 12 experts"),
        ((16, 8, 2, 8), "12 experts cannot be divided evenly among 8 groups"),
        ((16, 4, 2, 0), "cannot be divided evenly among 0 GPUs"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        eplb.rebalance_experts(torch.ones(1, 12), *sizes)


machines = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], torch.Tensor, list[bool], int]:
    """Uneven ranks, some of them gone, and a placement with holes."""
    slots_of_rank = draw(machines)
    active = draw(st.lists(st.booleans(), min_size=len(slots_of_rank), max_size=len(slots_of_rank)))
    experts, seed = draw(st.integers(1, 6)), draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    current = torch.randint(-1, experts, (2, sum(slots_of_rank)), generator=generator)
    return loads(2, experts, seed), slots_of_rank, current, active, draw(st.integers(1, 3))


def plan_or_none(
    weight: torch.Tensor, slots_of_rank: list[int], current: torch.Tensor, active: list[bool], least: int
) -> eplb.Plan | None:
    """The plan, or None where there is no room for it."""
    try:
        return eplb.rebalance(weight, slots_of_rank, current=current, active_ranks=active, min_replicas=least)
    except PlacementError:
        return None


@given(cases())
def test_a_plan_keeps_its_promises_or_says_that_there_is_no_room(
    case: tuple[torch.Tensor, list[int], torch.Tensor, list[bool], int],
) -> None:
    weight, slots_of_rank, current, active, least = case
    assume(any(active))
    experts = weight.shape[1]
    room = [slots for slots, lives in zip(slots_of_rank, active, strict=True) if lives]
    fits = sum(min(slots, experts) for slots in room) >= experts * least and len(room) >= least
    plan = plan_or_none(weight, slots_of_rank, current, active, least)
    if plan is None:
        # Slots enough are not all when ranks are not equal.
        assert not fits or max(room) * len(room) > sum(room)
        return
    assert fits
    assert int(plan.expert_count.min()) >= least
    for table in plan.physical_to_logical:
        for part, lives in zip(table.split(slots_of_rank), active, strict=True):
            held = [expert for expert in part.tolist() if expert >= 0]
            assert len(held) == len(set(held))
            assert lives or not held
    assert torch.equal(follow(current, plan), plan.physical_to_logical)
    for layer, expert, source, _ in plan.moves.tolist():
        live = [
            slot
            for slot, held in enumerate(current[layer].tolist())
            if held == expert and active[plan_rank(slots_of_rank, slot)]
        ]
        assert (source in live) if live else source == -1
    assert len(plan.moves) == copies_needed(current, plan.physical_to_logical, slots_of_rank)


def plan_rank(slots_of_rank: list[int], slot: int) -> int:
    """Whose slot it is."""
    rank = 0
    while slot >= slots_of_rank[rank]:
        slot -= slots_of_rank[rank]
        rank += 1
    return rank


def best_possible(load: list[float], slots: int) -> float:
    """The least load of the heavier of two ranks over all placements."""
    best = float("inf")
    for extra in combinations_with_replacement(range(len(load)), 2 * slots - len(load)):
        items = [*range(len(load)), *extra]
        shares = [load[one] / items.count(one) for one in items]
        for chosen in combinations(range(len(items)), slots):
            first = sum(shares[i] for i in chosen)
            best = min(best, max(first, sum(shares) - first))
    return best


@given(st.integers(0, 10**6))
def test_small_placements_lie_between_the_best_there_is_and_deepseeks(seed: int) -> None:
    weight = loads(1, 4, seed).round()
    plan = eplb.rebalance(weight, [3, 3], anti_affinity=False)
    theirs, _, _ = eplb.rebalance_experts(weight, 6, 1, 1, 2)
    ours, bound = (
        float(eplb.max_over_mean(weight, table, [3, 3])[0]) for table in (plan.physical_to_logical, theirs)
    )
    best = best_possible(weight[0].tolist(), 3) * 2 / float(weight.sum())
    assert best * (1 - 1e-6) <= ours <= bound * (1 + 1e-6)


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "drift"),
    [(256, 288, 32, 0.5), (256, 288, 8, 0.5), (288, 288, 16, 0.3), (256, 320, 64, 0.3), (256, 288, 32, None)],
)
def test_ranks_are_as_even_as_deepseeks_for_a_quarter_of_the_moves(
    experts: int, slots: int, ranks: int, drift: float | None
) -> None:
    old, noise = loads(8, experts, 1), loads(8, experts, 2)
    new = noise if drift is None else old * (noise / 1000) ** drift
    machine = [slots // ranks] * ranks
    before, _, _ = eplb.rebalance_experts(old, slots, 1, 1, ranks)
    theirs, _, _ = eplb.rebalance_experts(new, slots, 1, 1, ranks)
    plan = eplb.rebalance(new, machine, current=before)
    evenness = eplb.max_over_mean(new, plan.physical_to_logical, machine)
    assert (evenness <= eplb.max_over_mean(new, theirs, machine) * (1 + 1e-6)).all()
    assert len(plan.moves) <= copies_needed(before, theirs, machine) / 4
    assert torch.equal(follow(before, plan), plan.physical_to_logical)


def test_a_balanced_placement_stays_as_it_is() -> None:
    before = torch.tensor([[0, 1, 2, 3]])
    plan = eplb.rebalance(torch.ones(1, 4), [2, 2], current=before)
    assert torch.equal(plan.physical_to_logical, before)
    assert plan.moves.shape == (0, 4)


def test_what_a_dead_rank_had_comes_from_replicas_or_from_a_backup() -> None:
    before = torch.tensor([[0, 1, 0, 2, 1, 2]])
    plan = eplb.rebalance(torch.ones(1, 3), [2, 2, 2], current=before, active_ranks=[True, True, False])
    assert int(plan.expert_count.min()) == 1
    assert set(plan.physical_to_logical[0, 4:].tolist()) == {-1}
    alone = torch.tensor([[0, 1, 2]])
    plan = eplb.rebalance(torch.ones(1, 3), [2, 1], current=alone, active_ranks=[True, True])
    assert not len(plan.moves)
    with pytest.raises(PlacementError, match="2 slots of 1 active ranks have no room for 1 replicas of 3"):
        eplb.rebalance(torch.ones(1, 3), [2, 1], current=alone, active_ranks=[True, False])
    plan = eplb.rebalance(torch.ones(1, 3), [3, 1], current=torch.tensor([[0, 1, 1, 2]]), active_ranks=[1, 0])
    assert plan.moves.tolist() == [[0, 2, -1, 2]]


def test_moves_for_balance_stay_within_their_bound() -> None:
    weight, before = loads(4, 64, 3), torch.arange(64).repeat(4, 1)
    plan = eplb.rebalance(weight, [8] * 8, current=before, max_moves=5)
    assert int(plan.moves[:, 0].bincount().max()) <= 5
    even = eplb.max_over_mean(weight, plan.physical_to_logical, [8] * 8)
    assert (even < eplb.max_over_mean(weight, before, [8] * 8)).all()
    assert not len(eplb.rebalance(weight, [8] * 8, current=before, max_moves=0).moves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(3)}, r"must be \[layers, experts\]"),
        ({"weight": torch.tensor([[1.0, float("nan"), 1.0]])}, "finite"),
        ({"weight": torch.tensor([[1.0, -1.0, 1.0]])}, "not negative"),
        ({"slots_of_rank": []}, "must name a number of slots"),
        ({"active_ranks": [True]}, "1 entries"),
        ({"active_ranks": [False, False]}, "no rank is active"),
        ({"current": torch.zeros(1, 5, dtype=torch.int64)}, r"must be \[1, 4\]"),
        ({"current": torch.tensor([[0, 1, 2, 3]])}, "slot 3 holds expert 3"),
        ({"min_replicas": 0}, "min_replicas 0"),
        ({"min_replicas": 3}, "have no room for 3 replicas"),
    ],
)
def test_tables_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    asked: dict[str, object] = {"weight": torch.ones(1, 3), "slots_of_rank": [2, 2], **change}
    with pytest.raises(PlacementError, match=message):
        eplb.rebalance(**asked)  # type: ignore[arg-type]
