"""What all buffers share: the ranks of a group, who of them is there, and which experts they have."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mooncake_ep._errors import PlacementError, ShapeError
from mooncake_ep.exchange.channel import COMBINE, DISPATCH, Channel
from mooncake_ep.exchange.peers import Peers
from mooncake_ep.layout import ExpertOwners

__all__ = ["DEFAULT_TIMEOUT_US", "GroupBuffer", "share"]

DEFAULT_TIMEOUT_US = 100_000_000  # DeepEP's


class GroupBuffer:
    """One rank's part of a group whose ranks share memory. Base of the buffers; makes none of the calls
    itself."""

    def __init__(self, group: dist.ProcessGroup, owners: ExpertOwners | None) -> None:
        self.group = group
        self.rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self._given_owners = self._fitting(owners) if owners is not None else None
        self._even: dict[int, ExpertOwners] = {}
        self._peers = Peers(self.rank, self.group_size, self._share)
        self._dispatches = Channel(self._peers, DISPATCH)
        self._combines = Channel(self._peers, COMBINE)

    def _share(self, mine: object) -> Sequence[object]:
        return share(self.group, self.group_size, mine)

    def update_ep_member(self) -> None:
        """Meet the ranks of the group anew: those that came back or are new, and those that were given up.

        All ranks of the group call it together, a new one by making its buffer. Handles from before are void.
        Ranks that a group of `mooncake_ep.pg` goes on without stay given up. Where the group has grown,
        experts are spread anew over all ranks, unless `set_owners` says how.
        """
        self.group_size = dist.get_world_size(self.group)
        self._even.clear()
        self._peers.meet(self.group_size)
        self._dispatches.restart()
        self._combines.restart()

    def destroy(self) -> None:
        """Let go of the other ranks' memory. The buffer is of no use afterwards."""
        self._peers.close()

    def set_owners(self, owners: ExpertOwners) -> None:
        """Change which rank has which expert, from the next dispatch on; on all ranks alike."""
        self._given_owners = self._fitting(owners)

    def _fitting(self, owners: ExpertOwners) -> ExpertOwners:
        if owners.num_ranks != self.group_size:
            raise PlacementError(f"owners are of {owners.num_ranks} ranks, the group has {self.group_size}")
        return owners

    def _owners(self, num_experts: int) -> ExpertOwners:
        given = self._given_owners
        if given is not None:
            self._fitting(given)
            if given.num_experts != num_experts:
                raise PlacementError(f"{num_experts} experts, but the owner table has {given.num_experts}")
            return given
        if num_experts not in self._even:
            self._even[num_experts] = ExpertOwners.even(num_experts, self.group_size)
        return self._even[num_experts]

    def _active(self) -> torch.Tensor:
        return torch.tensor(self._peers.alive, dtype=torch.int32)

    def _give_up(self, active_ranks: torch.Tensor | None) -> None:
        if active_ranks is None:
            return
        if active_ranks.dtype != torch.int32 or tuple(active_ranks.shape) != (self.group_size,):
            raise ShapeError(
                f"active_ranks must be int32 [{self.group_size}], "
                f"not {active_ranks.dtype} {tuple(active_ranks.shape)}"
            )
        for rank, active in enumerate(active_ranks.cpu().tolist()):
            if not active:
                self._peers.alive[rank] = False

    def _tell_active(self, active_ranks: torch.Tensor | None) -> None:
        if active_ranks is not None:
            active_ranks.copy_(self._active())


def share(group: dist.ProcessGroup, size: int, mine: object) -> list[object]:
    """Give every rank what each has, in order of rank; None for ranks that a group goes on without."""
    told: list[object] = [None] * size
    if getattr(group, "members", None) is None:
        dist.all_gather_object(told, mine, group=group)
        return told
    # all_gather_object cannot read what it gets for ranks that are out: zeros.
    packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(packed)]), group=group)
    lengths = [int(one) for one in sizes]
    rows = [torch.zeros(max(lengths), dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(rows, torch.nn.functional.pad(packed, (0, max(lengths) - len(packed))), group=group)
    for rank, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        if length and bool(row[:length].any()):  # it may have died between the two
            told[rank] = pickle.loads(row[:length].numpy().tobytes())
    return told
