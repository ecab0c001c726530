"""A smaller group of those who are left: what torch's `shrink_group` is for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mooncake_ep.pg.errors import GroupUnavailable
from mooncake_ep.pg.group import MooncakeProcessGroup
from mooncake_ep.pg.membership import deactivate_ranks

__all__ = ["shrink_group"]


def shrink_group(
    ranks_to_exclude: Sequence[int], group: Any = None, timeout: timedelta | None = None
) -> MooncakeProcessGroup:
    """Make a new group of all members but these, with ranks from 0 on. A collective of those who stay.

    `ranks_to_exclude`: ranks in `group` (None: the default group), alive or not; they are out of it, too.
    Members that are found gone are left out as well, and all who stay agree on whom. The default group stays
    what it is, without those ranks. Needs torch's store, for the new group to find each other: if the process
    that serves it is gone, go on with the group that is there.

    torch's own `dist.shrink_group` takes only backends that are C++ objects (2.13), which this one is not.
    """
    old: Any = dist.group.WORLD if group is None else group
    if not isinstance(old, MooncakeProcessGroup):
        raise GroupUnavailable(f"{old!r} is no process group of the backends mooncake and mooncake-cpu")
    if old.rank() in ranks_to_exclude:
        raise GroupUnavailable(f"rank {old.rank()} is to be excluded and must not call shrink_group()")
    deactivate_ranks(old, ranks_to_exclude, timeout)
    left = [dist.get_global_rank(old, rank) for rank in old.members]
    made: Any = dist.new_group(
        left,
        timeout or timedelta(seconds=old.timeout_s),
        backend=old.getBackendName(),
        use_local_synchronization=True,
        group_desc=f"{old.getGroupDesc()}:shrunk",
    )
    if not isinstance(made, MooncakeProcessGroup):
        raise GroupUnavailable(f"torch made no group of the ranks {left}")
    return made
