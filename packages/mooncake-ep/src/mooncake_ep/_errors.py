"""What can go wrong in expert parallelism.

All but PeerError is the caller's mistake: repeating the call does not help.

EpError
├─ PeerError        a rank cannot be reached, or has left this one behind
├─ PlacementError   the table of expert owners is impossible
├─ RoutingError     a token is sent to experts that cannot take it
└─ ShapeError       tensors that belong together do not fit together
"""

from __future__ import annotations

__all__ = ["EpError", "PeerError", "PlacementError", "RoutingError", "ShapeError"]


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
