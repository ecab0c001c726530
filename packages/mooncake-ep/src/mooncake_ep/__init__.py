"""Expert-parallel dispatch and combine for mixture-of-experts models.

`layout` says which rank gets which token; `reference` is the exact meaning of dispatch and combine in plain
torch.
"""

from __future__ import annotations

from mooncake_ep._errors import EpError, PlacementError, RoutingError, ShapeError
from mooncake_ep.layout import DispatchLayout, ExpertOwners, get_dispatch_layout

__all__ = [
    "DispatchLayout",
    "EpError",
    "ExpertOwners",
    "PlacementError",
    "RoutingError",
    "ShapeError",
    "get_dispatch_layout",
]
