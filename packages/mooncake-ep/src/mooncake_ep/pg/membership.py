"""Who is in a group: taking ranks back, in and out. Functions of upstream's `mooncake.pg`, by their names.

`backend` is a process group, or torch's `dist.group.WORLD`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from mooncake_ep.pg.errors import GroupUnavailable
from mooncake_ep.pg.group import MooncakeProcessGroup
from mooncake_ep.pg.work import GroupWork, error_of, seconds

__all__ = [
    "FaultPoint",
    "ProposalResponse",
    "ProposalStatus",
    "activate_ranks",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "inject_fault",
    "join_group",
    "recover_ranks",
    "sync_after_failure",
]


class ProposalStatus(enum.Enum):
    """How a change of the members ended."""

    Applied = "applied"
    NoPending = "no pending"
    Rejected = "rejected"


@dataclass(frozen=True)
class ProposalResponse:
    """What came of a change: the ranks that it was applied to, and why not to others."""

    status: ProposalStatus
    ranks: tuple[int, ...] = ()
    dropped_ranks: tuple[int, ...] = field(default=())
    reject_reason: str = ""


class FaultPoint(enum.IntEnum):
    """Where a fault can strike on purpose, in the order of an operation."""

    BEFORE_PUBLISH = 1
    AFTER_PUBLISH = 2
    WHILE_READING = 3
    BEFORE_RESULT = 4
    BEFORE_RETURN = 5
    BEFORE_JOIN = 6


def _group_of(backend: Any) -> MooncakeProcessGroup:
    if isinstance(backend, MooncakeProcessGroup):
        return backend
    raise GroupUnavailable(f"{backend!r} is no process group of the backends mooncake and mooncake-cpu")


def get_active_ranks(backend: Any) -> torch.Tensor:
    """Return int32 [max_group_size]: 1 for each rank that is in the group."""
    group = _group_of(backend)
    active = torch.zeros(group.engine.capacity, dtype=torch.int32)
    active[group.members] = 1
    return active


def get_num_synced_ranks(backend: Any) -> int:
    """Return how many ranks are in the group or wait to be let in."""
    group = _group_of(backend)
    return sum(get_peer_state(group, range(group.engine.capacity)))


def get_peer_state(backend: Any, ranks: Sequence[int]) -> list[bool]:
    """Say for each rank whether it is in the group and alive, or waits in `join_group`. Asks nobody."""
    group = _group_of(backend)
    for rank in ranks:
        if not 0 <= rank < group.engine.capacity:
            raise GroupUnavailable(
                f"rank {rank} is outside of the group's {group.engine.capacity} places; see max_group_size"
            )
    return [_is_here(group, rank) for rank in ranks]


def _is_here(group: MooncakeProcessGroup, rank: int) -> bool:
    if rank == group.rank():
        return True
    return group.engine.waits(rank) or (rank in group.members and not group.engine.gone(rank))


def recover_ranks(
    backend: Any, ranks: Sequence[int], timeout: timedelta | float | None = None
) -> ProposalResponse:
    """Let in those of `ranks` whom every member sees waiting. A collective: every member calls it, in order.

    Applied, with their numbers, also if they are only some; Rejected when there are none. Takes two rounds
    and no longer than the slowest member. Raises GroupError if this rank is evicted meanwhile.
    """
    group = _group_of(backend)
    wanted = sorted(set(ranks))
    get_peer_state(group, wanted)
    missing = [rank for rank in wanted if rank not in group.members]
    if not missing:
        return ProposalResponse(ProposalStatus.Applied, tuple(wanted))
    result = group.engine.admit(missing, _limit(group, timeout))
    if (error := error_of(result)) is not None:
        group.note(result)
        raise error
    group.take_members()
    admitted = tuple(rank for rank in missing if rank in result.contributors)
    left = tuple(rank for rank in missing if rank not in admitted)
    reason = f"not every member sees the ranks {list(left)} in join_group()" if left else ""
    status = ProposalStatus.Applied if admitted else ProposalStatus.Rejected
    return ProposalResponse(status, admitted, left, reason)


activate_ranks = recover_ranks


def deactivate_ranks(
    backend: Any, ranks: Sequence[int], timeout: timedelta | float | None = None
) -> ProposalResponse:
    """Take ranks out at once, alive or not. A collective of the members that stay; places stay as holes.

    Raises RankEvicted where this rank is one of them, and in their next operation if they do not call this.
    """
    group = _group_of(backend)
    named = sorted(set(ranks) & set(group.members))
    if not named:
        return ProposalResponse(ProposalStatus.NoPending)
    result = group.engine.expel(named, _limit(group, timeout))
    group.note(result)
    if (error := error_of(result)) is not None:
        raise error
    return ProposalResponse(ProposalStatus.Applied, tuple(named))


def extend_group_size_to(backend: Any, size: int) -> None:
    """Let the group have `size` places, up to its `max_group_size`; new ones are empty. No collective."""
    group = _group_of(backend)
    if size > group.engine.capacity:
        raise GroupUnavailable(
            f"the group has room for {group.engine.capacity} ranks, not {size}; "
            "set max_group_size in its MooncakeBackendOptions"
        )
    group.resize(size)


def join_group(backend: Any, timeout: timedelta | float | None = None) -> None:
    """Wait until the members let this rank in by `recover_ranks`: replacements, arrivals, evicted ranks.

    The next operation is the members' next one. Raises GroupTimeout when nobody did.
    """
    group = _group_of(backend)
    result = group.engine.join(_limit(group, timeout))
    if (error := error_of(result)) is not None:
        raise error
    group.take_members()


def sync_after_failure(backend: Any, timeout: timedelta | float | None = None) -> ProposalStatus:
    """Agree on the members now, in a round without data. Applied if somebody is found out, else NoPending.

    Every operation does this by itself; call it to learn of failures while there is nothing else to do.
    """
    group = _group_of(backend)
    before = group.members
    result: Any = group.engine.barrier(_limit(group, timeout), False)
    group.note(result)
    if result is not None and (error := error_of(result)) is not None:
        raise error
    return ProposalStatus.NoPending if group.members == before else ProposalStatus.Applied


def get_failed_ranks_hint(work: GroupWork) -> list[int]:
    """Return the members that were lost during an operation; waits for its end."""
    work.join()
    return list(work.failed_ranks)


def get_local_success(work: GroupWork) -> bool:
    """Whether this rank's part of an operation went through; waits for its end and does not raise."""
    return work.local_success


def inject_fault(backend: Any, point: FaultPoint, nth: int = 1, *, kill: bool = True) -> None:
    """Kill (SIGKILL) or stop (SIGSTOP) this process when it comes to a point for the `nth` time from now."""
    if nth < 1:
        raise GroupUnavailable(f"nth is {nth}; the next time is 1")
    _group_of(backend).engine.plan_fault(int(point), nth, kill)


def _limit(group: MooncakeProcessGroup, timeout: timedelta | float | None) -> float:
    limit = seconds(timeout)
    return limit if limit > 0 else group.timeout_s
