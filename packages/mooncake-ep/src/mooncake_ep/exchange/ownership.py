"""Which experts a rank has, as the core takes it."""

from __future__ import annotations

from functools import lru_cache

import torch

from mooncake_ep.layout import ExpertOwners

__all__ = ["experts_as_tensor", "local_ids"]


@lru_cache(maxsize=64)
def local_ids(owners: ExpertOwners, rank: int) -> torch.Tensor:
    """int32 [experts]: the local id of every expert of `rank`, -1 for those of others."""
    ids = zip(owners.owner_of, owners.local_id_of, strict=True)
    return torch.tensor([local if owner == rank else -1 for owner, local in ids], dtype=torch.int32)


@lru_cache(maxsize=1024)
def experts_as_tensor(owners: ExpertOwners, rank: int) -> torch.Tensor:
    """int64 [local experts]: the experts of `rank`."""
    return torch.tensor(owners.experts_of(rank), dtype=torch.int64)
