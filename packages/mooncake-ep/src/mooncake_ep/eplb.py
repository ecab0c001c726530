"""Where replicas of experts go, so that ranks carry equal loads.

`rebalance_experts` is DeepSeek's published algorithm to the letter. `rebalance` starts from the placement
that is there: it keeps ranks as even as DeepSeek's would be, leaves out ranks that are gone, and lists the
few replicas that have to be copied. Both are compiled and take milliseconds for a whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mooncake_ep import _core
from mooncake_ep._errors import PlacementError

__all__ = ["Plan", "max_over_mean", "rebalance", "rebalance_experts"]


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place replicas as `rebalance_experts` of https://github.com/deepseek-ai/EPLB does.

    `weight` [layers, experts] is the load of each logical expert. Groups of experts go to nodes, experts are
    replicated within nodes and packed onto GPUs; when `num_groups` cannot be divided among nodes, the whole
    machine is one node. Loads that are equal keep the order of their experts.

    Returns int64 `physical_to_logical` [layers, replicas], `logical_to_physical` [layers, experts, most
    replicas of any] padded with -1, and `expert_count` [layers, experts]. Raises PlacementError for sizes
    that do not divide each other, or loads that are negative or not finite.
    """
    load = _checked_load(weight)
    layers, experts = load.shape
    if num_nodes < 1 or num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    _check_sizes(experts, num_replicas, num_groups, num_nodes, num_gpus)
    # Torch adds the loads of a group as the published code does; order matters to the last bit.
    group_load = load.view(layers, num_groups, experts // num_groups).sum(-1).contiguous()
    expert_of = torch.empty(layers, num_replicas, dtype=torch.int64)
    replica_of = torch.empty_like(expert_of)
    counts = torch.empty(layers, experts, dtype=torch.int64)
    _core.eplb_exact(
        layers,
        experts,
        num_replicas,
        num_groups,
        num_nodes,
        num_gpus,
        *(one.data_ptr() for one in (load, group_load, expert_of, replica_of, counts)),
    )
    return expert_of, _slots_of_experts(expert_of, replica_of, counts), counts


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement, and the way to it from the one before. All int64.

    `physical_to_logical` [layers, slots]: the expert of each slot; -1 for slots of ranks that are not active,
    and for slots that no expert may take. `logical_to_physical` [layers, experts, most]: the slots of each
    expert, ascending, padded with -1. `expert_count` [layers, experts].

    `moves` [moves, 4]: layer, logical expert, source slot, destination slot. Sources are slots of active
    ranks in the placement *before*, so whoever copies in place reads all sources of a layer before writing
    any; -1 where no active rank has the expert, which then comes from a backup.
    """

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    expert_count: torch.Tensor
    moves: torch.Tensor


def rebalance(
    weight: torch.Tensor,
    slots_of_rank: Sequence[int],
    *,
    current: torch.Tensor | None = None,
    active_ranks: Sequence[bool] | torch.Tensor | None = None,
    min_replicas: int = 1,
    anti_affinity: bool = True,
    max_moves: int | None = None,
) -> Plan:
    """Change a placement just so much that no rank carries more than it would in DeepSeek's.

    `weight` [layers, experts] is the load of each expert. Rank r has `slots_of_rank[r]` slots, which follow
    those of the ranks before it; ranks need not be equal. `current` [layers, slots] is what slots hold now,
    -1 for nothing; None: nothing anywhere. `active_ranks` [ranks]: ranks that count; None: all.

    Every expert gets `min_replicas` or more; with `anti_affinity` its replicas are on different ranks, so
    that min_replicas - 1 ranks may fail without loss. `max_moves` bounds the moves of each layer for the sake
    of balance; what the promises above need is moved all the same.

    Raises PlacementError when the active ranks have no room for that, or for tables and loads that make no
    sense.
    """
    load = _checked_load(weight)
    layers, experts = load.shape
    active = _checked_machine(slots_of_rank, active_ranks)
    after = _checked_current(current, layers, experts, sum(slots_of_rank))
    if min_replicas < 1 or (max_moves is not None and max_moves < 0):
        raise PlacementError(
            f"min_replicas {min_replicas} must be 1 or more and max_moves {max_moves} 0 or more"
        )
    room = sum(slots for slots, is_active in zip(slots_of_rank, active, strict=True) if is_active)
    try:
        moves = _core.eplb_rebalance(
            list(slots_of_rank),
            active,
            layers,
            experts,
            min_replicas,
            anti_affinity,
            room if max_moves is None else max_moves,
            load.data_ptr(),
            after.data_ptr(),
        )
    except ValueError:
        raise PlacementError(
            f"{room} slots of {sum(active)} active ranks have no room for {min_replicas} replicas of "
            f"{experts} experts{' on different ranks' if anti_affinity else ''}; "
            "lower min_replicas or bring ranks back"
        ) from None
    counts = _count(after, experts)
    listed = (
        torch.frombuffer(bytearray(moves), dtype=torch.int64) if moves else torch.empty(0, dtype=torch.int64)
    )
    return Plan(
        after, _slots_of_experts(after, _nth_replica(after, experts), counts), counts, listed.view(-1, 4)
    )


def max_over_mean(
    weight: torch.Tensor,
    physical_to_logical: torch.Tensor,
    slots_of_rank: Sequence[int],
    active_ranks: Sequence[bool] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float64 [layers]: what the heaviest active rank carries over what active ranks carry on average.

    An expert's load is shared evenly by its replicas. A layer without load is even: 1.
    """
    load = _checked_load(weight).double()
    active = _checked_machine(slots_of_rank, active_ranks)
    table = _checked_current(physical_to_logical, len(load), load.shape[1], sum(slots_of_rank))
    share = load / _count(table, load.shape[1]).clamp(min=1)
    of_slot = share.gather(1, table.clamp(min=0)).masked_fill(table < 0, 0.0)
    of_rank = torch.stack([part.sum(1) for part in torch.split(of_slot, list(slots_of_rank), dim=1)], dim=1)
    mean = load.sum(1) / sum(active)
    return torch.where(mean > 0, of_rank.amax(1) / mean, torch.ones_like(mean))


def _count(table: torch.Tensor, experts: int) -> torch.Tensor:
    """Replicas of each expert, [layers, experts]."""
    counts = torch.zeros(len(table), experts + 1, dtype=torch.int64)
    return counts.scatter_add_(1, table + 1, torch.ones_like(table))[:, 1:].contiguous()


def _nth_replica(table: torch.Tensor, experts: int) -> torch.Tensor:
    """Which replica of its expert each slot has, in order of slot; [layers, slots]."""
    order = table.argsort(dim=1, stable=True)
    counts = torch.zeros(len(table), experts + 1, dtype=torch.int64)
    counts.scatter_add_(1, table + 1, torch.ones_like(table))
    first = counts.cumsum(1) - counts
    place = torch.arange(table.shape[1]).expand_as(table) - first.gather(1, table.gather(1, order) + 1)
    return torch.empty_like(table).scatter_(1, order, place)


def _slots_of_experts(
    expert_of: torch.Tensor, replica_of: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Turn slot → expert into expert → slots, padded with -1."""
    layers, experts = counts.shape
    most = int(counts.max())
    slots = torch.full((layers, experts * most + 1), -1, dtype=torch.int64)
    # Slots without an expert go past the end, which is then cut off.
    places = torch.where(expert_of < 0, experts * most, expert_of * most + replica_of)
    slots.scatter_(1, places, torch.arange(expert_of.shape[1]).expand_as(expert_of).contiguous())
    return slots[:, :-1].reshape(layers, experts, most)


def _checked_load(weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() != 2 or 0 in weight.shape:
        raise PlacementError(
            f"loads must be [layers, experts], at least one of each, not {tuple(weight.shape)}"
        )
    load = weight.detach().float().cpu().contiguous()
    if not bool((load.isfinite() & (load >= 0)).all()):
        raise PlacementError("loads must be finite and not negative")
    return load


def _check_sizes(experts: int, replicas: int, groups: int, nodes: int, gpus: int) -> None:
    divisions = (
        (experts, groups, "experts", "groups"),
        (gpus, nodes, "GPUs", "nodes"),
        (replicas, gpus, "replicas", "GPUs"),
    )
    for whole, parts, name, of in divisions:
        if parts < 1 or whole % parts:
            raise PlacementError(f"{whole} {name} cannot be divided evenly among {parts} {of}")
    if replicas < experts:
        raise PlacementError(
            f"{replicas} replicas are too few for {experts} experts; give one of each at least"
        )


def _checked_machine(
    slots_of_rank: Sequence[int], active_ranks: Sequence[bool] | torch.Tensor | None
) -> list[bool]:
    ranks = len(slots_of_rank)
    active = [True] * ranks if active_ranks is None else [bool(one) for one in active_ranks]
    if not ranks or min(slots_of_rank) < 0 or len(active) != ranks:
        raise PlacementError(
            f"slots_of_rank {list(slots_of_rank)} must name a number of slots for each rank, "
            f"and active_ranks, {len(active)} entries, as many ranks"
        )
    if not any(active):
        raise PlacementError("no rank is active: there is nobody to place experts on")
    return active


def _checked_current(current: torch.Tensor | None, layers: int, experts: int, slots: int) -> torch.Tensor:
    """Return a copy as int64 [layers, slots] with experts or -1."""
    if current is None:
        return torch.full((layers, slots), -1, dtype=torch.int64)
    if tuple(current.shape) != (layers, slots):
        raise PlacementError(f"the placement must be [{layers}, {slots}], not {tuple(current.shape)}")
    table = current.detach().to("cpu", torch.int64, copy=True).contiguous()
    outside = (table < -1) | (table >= experts)
    if bool(outside.any()):
        layer, slot = outside.nonzero()[0].tolist()
        raise PlacementError(
            f"layer {layer}: slot {slot} holds expert {int(table[layer, slot])}; "
            f"experts go from 0 to {experts - 1}, and -1 is an empty slot"
        )
    return table
