"""What can go wrong in expert parallelism.

PeerError and RepairError are about other ranks. The rest is the caller's mistake: repeating the call does not
help.

EpError
├─ PeerError        a rank cannot be reached, or has left this one behind
├─ PlacementError   the table of expert owners is impossible
├─ RepairError      weights of an expert could not be brought to a slot
│  ├─ ExpertLost    no rank that is there has them
│  └─ RepairTimeout the deadline has passed
├─ RoutingError     a token is sent to experts that cannot take it
└─ ShapeError       tensors that belong together do not fit together
"""

from __future__ import annotations

__all__ = [
    "EpError",
    "ExpertLost",
    "PeerError",
    "PlacementError",
    "RepairError",
    "RepairTimeout",
    "RoutingError",
    "ShapeError",
]


class EpError(ValueError):
    """Base of every error of this package."""


class PeerError(EpError):
    """A rank's memory cannot be reached, or the others went on without this rank: call `update_ep_member`."""


class PlacementError(EpError):
    """An expert owner table names no expert, no rank, or a rank that is not there."""


class RoutingError(EpError):
    """A token's top-k choice has the wrong type, names an unknown expert, or names one expert twice."""


class ShapeError(EpError):
    """Activations, routing and weights differ in rows, columns, width or type."""


class RepairError(EpError):
    """Weights of an expert could not be copied. Copies may be started again, from ranks that are there.

    Attributes:
        layer, expert: whose weights.
        rank, slot: where they were to go; the slot counted over all ranks, -1 for a copy in host memory.
        sources: ranks that were asked in vain.
    """

    def __init__(
        self, what: str, *, layer: int, expert: int, rank: int, slot: int, sources: tuple[int, ...] = ()
    ) -> None:
        self.layer, self.expert, self.rank, self.slot, self.sources = layer, expert, rank, slot, sources
        where = f"slot {slot} of rank {rank}" if slot >= 0 else f"host memory of rank {rank}"
        super().__init__(f"layer {layer}, expert {expert}, to {where}: {what}")


class ExpertLost(RepairError):
    """No rank that is there has the expert, neither in a slot nor in host memory: load it from storage."""


class RepairTimeout(RepairError, TimeoutError):
    """The deadline passed first. What was copied is kept; slots that had an expert still have it."""
