"""Where weights of an expert can be read, and who keeps a copy of those that are about to be lost.

Pure functions of the placement; slots are counted over all ranks, one rank's after those of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from mooncake_ep._errors import PlacementError
from mooncake_ep.repair.weights import Offer

__all__ = ["Source", "last_copies", "rank_of_slot", "sources_of"]


@dataclass(frozen=True)
class Source:
    """A place to read an expert from: a rank, the descriptor of its region and the offset there in bytes."""

    rank: int
    descriptor: bytes
    offset: int


def rank_of_slot(slots_of_rank: Sequence[int], slot: int) -> tuple[int, int]:
    """Return the rank of a slot, and which of its slots it is. Raises PlacementError."""
    first = 0
    for rank, slots in enumerate(slots_of_rank):
        if first <= slot < first + slots:
            return rank, slot - first
        first += slots
    raise PlacementError(f"slot {slot} of {first} slots")


def sources_of(
    layer: int,
    expert: int,
    preferred: int,
    placement: torch.Tensor,
    slots_of_rank: Sequence[int],
    offers: Mapping[int, Offer],
) -> list[Source]:
    """Every place that an expert can be read from: the preferred slot, other slots, host copies.

    `placement` int64 [layers, slots] is what slots hold now; only ranks in `offers` count.
    """
    slots = [int(one) for one in (placement[layer] == expert).nonzero().flatten()]
    slots.sort(key=lambda slot: slot != preferred)
    found = []
    for slot in slots:
        rank, local = rank_of_slot(slots_of_rank, slot)
        if rank in offers:
            offer = offers[rank]
            found.append(Source(rank, offer.slots[layer], local * offer.slot_bytes[layer]))
    for rank, offer in sorted(offers.items()):
        if (layer, expert) in offer.kept:
            found.append(Source(rank, *offer.kept[layer, expert]))
    return found


def last_copies(
    placement: torch.Tensor, slots_of_rank: Sequence[int], active_ranks: Sequence[bool]
) -> list[tuple[int, int, int]]:
    """Say who keeps copies in host memory, so that no single failure loses an expert: (layer, expert, rank).

    Experts that only one active rank has in its slots are kept by another, each in turn by the one that keeps
    fewest. `placement` int64 [layers, slots]. Every rank computes the same. Nobody keeps anything where there
    is only one active rank.
    """
    ends = list(accumulate(slots_of_rank))
    if placement.shape[1] != ends[-1] or len(active_ranks) != len(slots_of_rank):
        raise PlacementError(
            f"placement {tuple(placement.shape)} and {len(active_ranks)} active_ranks must be of {ends[-1]} "
            f"slots and {len(slots_of_rank)} ranks"
        )
    keeps = {rank: 0 for rank, active in enumerate(active_ranks) if active}
    found = []
    for layer, row in enumerate(placement.tolist()):
        holders: dict[int, set[int]] = {}
        for rank in keeps:
            for expert in row[ends[rank] - slots_of_rank[rank] : ends[rank]]:
                holders.setdefault(expert, set()).add(rank)
        for expert in sorted(set(holders) - {-1}):
            others = keeps.keys() - holders[expert]
            if len(holders[expert]) == 1 and others:
                keeper = min(others, key=lambda rank: (keeps[rank], rank))
                keeps[keeper] += 1
                found.append((layer, expert, keeper))
    return found
