"""How a process group is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake_ep.pg.errors import GroupUnavailable

__all__ = ["SHARED", "WIRE", "MooncakeBackendOptions"]

SHARED, WIRE = "shared", "wire"
ENGINES = (SHARED, WIRE)


class MooncakeBackendOptions:
    """Options of one group, for `pg_options` of `init_process_group` and `new_group`.

    `MooncakeBackendOptions(active_ranks, is_extension=False, max_group_size=None)`: `active_ranks` is an
    int32 tensor with a place for every rank; 1: it is there from the start. The group keeps it up to date.
    `MooncakeBackendOptions(max_group_size, is_extension=False)`: all ranks are there from the start.

    `is_extension`: this process comes to a group that exists. Until `join_group()` it works alone.
    `max_group_size`: how far the group can grow, up to 1024 ranks; not less than its size.
    `engine`: how ranks reach each other, the same on all. "shared": memory of one host; "wire": connections
    between hosts; None: "shared" where all first ranks are on one host, else "wire".
    `host`: the address under which ranks of other hosts reach this one; None: any of its interfaces'.
    """

    def __init__(
        self,
        active_ranks: torch.Tensor | Sequence[int] | int | None = None,
        is_extension: bool = False,
        max_group_size: int | bool | None = None,
        *,
        auto_deactivate_on_failure: bool = True,
        auto_sync_on_failure: bool = True,
        engine: str | None = None,
        host: str | None = None,
    ) -> None:
        if not (auto_deactivate_on_failure and auto_sync_on_failure):
            raise GroupUnavailable(
                "a group always goes on without ranks that failed, in the operation in which they do; "
                "auto_deactivate_on_failure and auto_sync_on_failure cannot be False"
            )
        if isinstance(active_ranks, int):
            max_group_size, active_ranks = active_ranks, None
        if active_ranks is not None and not isinstance(active_ranks, torch.Tensor):
            active_ranks = torch.tensor(list(active_ranks), dtype=torch.int32)
        self.active_ranks: torch.Tensor | None = active_ranks
        if engine not in (None, *ENGINES):
            raise GroupUnavailable(f"engine is {engine!r}; choose of {ENGINES}, or None")
        self.engine, self.host = engine, host
        self.is_extension = is_extension
        self.max_group_size: int | None = None if max_group_size is None else int(max_group_size)

    def capacity(self, size: int) -> int:
        """How many ranks a group of `size` may come to have."""
        listed = 0 if self.active_ranks is None else self.active_ranks.numel()
        return max(size, listed, self.max_group_size or 0)

    def first_members(self, size: int) -> list[int]:
        """Return the ranks that are there from the start."""
        if self.active_ranks is None:
            return list(range(size))
        flags = self.active_ranks.tolist()[:size]
        return [rank for rank in range(size) if rank >= len(flags) or flags[rank]]
