"""Weights reach the slots of a new placement, from ranks in other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import EpError, ExpertLost, PlacementError, RepairError, RepairTimeout, ShapeError, eplb
from mooncake_ep.repair import HostBackup, Offer, SlotWeights, last_copies, start_repair
from mooncake_transfer import TransferConfig, TransferEngine

LAYERS, EXPERTS, NUMBERS = 2, 4, 300
CONFIG = TransferConfig(host="127.0.0.1")


def weights_of(layer: int, expert: int) -> torch.Tensor:
    return torch.arange(NUMBERS, dtype=torch.float32) + 1000 * (EXPERTS * layer + expert)


def held(placement: torch.Tensor, first: int, slots: int) -> list[torch.Tensor]:
    """What a rank has in its slots; zeros where nothing."""
    return [
        torch.stack([weights_of(layer, expert) * (expert >= 0) for expert in row[first : first + slots]])
        for layer, row in enumerate(placement.tolist())
    ]


def check(layers: list[torch.Tensor], placement: torch.Tensor, first: int) -> None:
    for layer, table in enumerate(layers):
        for slot, row in enumerate(table):
            expert = int(placement[layer, first + slot])
            if expert >= 0:
                assert torch.equal(row, weights_of(layer, expert)), (layer, slot)


def shared(group: dist.ProcessGroup, mine: Offer) -> dict[int, Offer]:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return dict(enumerate(told))


def test_moves_of_a_plan_reach_their_slots_and_nothing_changes_before_the_commit(ranks: Any) -> None:
    """Three ranks with loads turned about: slots are read by others and written by their own rank."""
    machine = [3, 3, 3]
    before = eplb.rebalance(torch.tensor([[9.0, 5, 3, 1], [1.0, 3, 5, 9]]), machine).physical_to_logical
    plan = eplb.rebalance(torch.tensor([[1.0, 3, 5, 9], [9.0, 5, 3, 1]]), machine, current=before)
    assert len(plan.moves) > 1

    def work(rank: int, group: dist.ProcessGroup) -> int:
        with TransferEngine(CONFIG) as engine:
            layers = held(before, 3 * rank, 3)
            kept = [one.clone() for one in layers]
            weights = SlotWeights(engine, rank, layers)
            offers = shared(group, weights.offer())
            repair = start_repair(weights, plan, before, machine, offers, deadline_s=60)
            repair.wait()
            assert all(torch.equal(one, two) for one, two in zip(layers, kept, strict=True))
            dist.barrier(group)
            repair.commit(3 * rank)
            check(layers, plan.physical_to_logical, 3 * rank)
            dist.barrier(group)
            weights.close()
        return repair.bytes_done

    moved = sum(ranks(3, work))
    assert moved == len(plan.moves) * NUMBERS * 4


def test_a_source_that_dies_is_replaced_and_the_last_copy_comes_from_host_memory(
    ranks: Any, tmp_path: Path
) -> None:
    """Rank 1 dies. Expert 0 is left on rank 0, expert 1 was on rank 1 alone: rank 2 kept a copy of it."""
    machine = [2, 2, 2]
    before = torch.tensor([[0, 2, 0, 1, 2, 3], [0, 2, 0, 1, 2, 3]])
    wanted = last_copies(before, machine, [True] * 3)
    assert wanted == [(0, 1, 0), (0, 3, 1), (1, 1, 2), (1, 3, 0)]

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        with TransferEngine(CONFIG) as engine:
            layers = held(before, 2 * rank, 2)
            weights, backup = SlotWeights(engine, rank, layers), HostBackup(engine, rank)
            offers = shared(group, weights.offer())
            backup.keep(wanted, before, machine, offers).wait()
            offers = shared(group, weights.offer(backup.kept))
            dist.barrier(group)
            if rank == 1:
                os._exit(1)
            after = before.clone()
            after[:, 2:4] = -1
            plan = eplb.rebalance(
                torch.ones(2, EXPERTS), machine, current=after, active_ranks=[True, False, True]
            )
            assert (plan.moves[:, 2] == -1).any(), "nobody has expert 1 in a slot"
            # Rank 1's offer is still here, as if nobody had noticed yet that it died.
            dead_first = {1: offers[1], **{one: offer for one, offer in offers.items() if one != 1}}
            repair = start_repair(weights, plan, before, machine, dead_first, deadline_s=60)
            repair.wait()
            repair.commit(2 * rank)
            check(layers, plan.physical_to_logical, 2 * rank)
            (tmp_path / f"done{rank}").touch()
            while not all((tmp_path / f"done{one}").exists() for one in (0, 2)):
                time.sleep(0.01)
            backup.close()
            weights.close()
            return sorted(expert for expert in plan.physical_to_logical[0].tolist() if expert >= 0)

    found = ranks(3, work)
    assert found[1] is None
    assert found[0] == found[2] == [0, 1, 2, 3]


def engines() -> tuple[TransferEngine, TransferEngine]:
    return TransferEngine(CONFIG), TransferEngine(CONFIG)


def test_what_cannot_be_copied_names_expert_slot_and_ranks() -> None:
    before = torch.tensor([[0, 1, -1, -1]])
    machine = [2, 2]
    plan = eplb.rebalance(torch.tensor([[1.0, 1.0]]), machine, current=before, min_replicas=2)
    ours, theirs = engines()
    with ours, theirs:
        source = SlotWeights(theirs, 0, [torch.ones(2, 1 << 20)])
        weights = SlotWeights(ours, 1, [torch.zeros(2, 1 << 20)])
        offers = {0: source.offer(), 1: weights.offer()}
        slow = start_repair(weights, plan, before, machine, offers, bytes_per_s=2 << 20, deadline_s=1.2)
        with pytest.raises(RepairTimeout, match=r"of 8388608 bytes copied") as late:
            slow.wait()
        assert (late.value.layer, late.value.rank, late.value.sources) == (0, 1, (0,))
        assert late.value.slot in (2, 3)
        assert 0 < slow.bytes_done < slow.bytes_total
        lost = start_repair(weights, plan, before, machine, {1: offers[1]})
        with pytest.raises(ExpertLost, match=r"to slot [23] of rank 1: no rank that is there has it"):
            lost.wait()
        source.close()
        refused = start_repair(weights, plan, before, machine, offers)
        with pytest.raises(RepairError, match="no source could be read: rank 0") as failed:
            refused.wait()
        assert isinstance(failed.value, EpError)
        assert failed.value.sources == (0,)


def test_a_budget_bounds_the_rate_and_a_repair_can_be_cancelled() -> None:
    before = torch.tensor([[0, 1, -1, -1]])
    machine = [2, 2]
    plan = eplb.rebalance(torch.tensor([[1.0, 1.0]]), machine, current=before, min_replicas=2)
    ours, theirs = engines()
    with ours, theirs:
        source = SlotWeights(theirs, 0, [torch.ones(2, 3 << 20)])
        weights = SlotWeights(ours, 1, [torch.zeros(2, 3 << 20)])
        offers = {0: source.offer()}
        began = time.monotonic()
        start_repair(weights, plan, before, machine, offers, bytes_per_s=50 << 20).wait()
        assert time.monotonic() - began > (24 - 4) / 50, "24 MiB, of which 4 MiB may go at once"
        assert all(bool((one == 1).all()) for one in weights.layers)
        slow = start_repair(weights, plan, before, machine, offers, bytes_per_s=1 << 20)
        with pytest.raises(TimeoutError, match="bytes are copied"):
            slow.wait(timeout_s=0.01)
        slow.cancel()
        with pytest.raises(RepairError, match="cancelled"):
            slow.wait()


def test_what_makes_no_sense_is_refused() -> None:
    before = torch.tensor([[0, 1, -1, -1]])
    plan = eplb.rebalance(torch.tensor([[1.0, 1.0]]), [2, 2], current=before)
    with TransferEngine(CONFIG) as engine:
        with pytest.raises(ShapeError, match="one contiguous tensor"):
            SlotWeights(engine, 0, [torch.ones(2, 3), torch.ones(3, 3)])
        weights = SlotWeights(engine, 0, [torch.ones(2, 3)])
        with pytest.raises(PlacementError, match="has 2 slots"):
            start_repair(weights, plan, before, [1, 3], {})
        with pytest.raises(ValueError, match="must be more than 0"):
            start_repair(weights, plan, before, [2, 2], {}, deadline_s=0)
        with pytest.raises(PlacementError, match="layer 1, slot 0"):
            weights.slot(1, 0)
    with pytest.raises(PlacementError, match="must be of 3 slots and 2 ranks"):
        last_copies(before, [1, 2], [True, True])


def test_last_copies_are_spread_and_never_kept_by_the_rank_that_serves() -> None:
    placement = torch.tensor([[0, 1, 2, 3, 0, -1]])
    assert last_copies(placement, [2, 2, 2], [True] * 3) == [(0, 1, 1), (0, 2, 0), (0, 3, 2)]
    assert last_copies(placement, [2, 2, 2], [True, False, False]) == []
