"""What can go wrong in a process group.

GroupError
├─ RankEvicted         this rank was too late; the others go on without it, join_group() comes back
├─ RankFailed          the rank that has the data is gone; the others go on, also after this error
├─ CollectiveMismatch  ranks called different collectives, or gave tensors that do not fit
├─ GroupTimeout        nothing came in time; trying again is safe
└─ GroupUnavailable    the operating system or the arguments do not allow it
"""

from __future__ import annotations

__all__ = [
    "CollectiveMismatch",
    "GroupError",
    "GroupTimeout",
    "GroupUnavailable",
    "RankEvicted",
    "RankFailed",
]


class GroupError(RuntimeError):
    """Base of every error of a process group."""


class RankEvicted(GroupError):
    """This rank was too late and the others evicted it. Its tensors of that operation are undefined."""


class RankFailed(GroupError):
    """The root of a broadcast or scatter, or the sender of a message, is gone. All survivors get this."""


class CollectiveMismatch(GroupError):
    """Ranks called different collectives, or one with tensors that do not fit together. The group goes on."""


class GroupTimeout(GroupError, TimeoutError):
    """A message, a member or an activation did not come in time."""


class GroupUnavailable(GroupError):
    """An argument or this machine makes the operation impossible."""
