"""Expert-parallel dispatch and combine for mixture-of-experts models.

`layout` says which rank gets which token; `reference` is the exact meaning of dispatch and combine in plain
torch. `eplb` places replicas of experts so that ranks carry equal loads, and `RouteTable` sends tokens to
those that live.
"""

from __future__ import annotations

from mooncake_ep import eplb, fp8
from mooncake_ep._errors import (
    EpError,
    ExpertLost,
    PeerError,
    PlacementError,
    RepairError,
    RepairTimeout,
    RoutingError,
    ShapeError,
)
from mooncake_ep.buffer import Buffer
from mooncake_ep.elastic import ElasticBuffer, EPHandle
from mooncake_ep.layout import DispatchLayout, ExpertOwners, get_dispatch_layout
from mooncake_ep.routes import RouteTable

__all__ = [
    "Buffer",
    "DispatchLayout",
    "EPHandle",
    "ElasticBuffer",
    "EpError",
    "ExpertLost",
    "ExpertOwners",
    "PeerError",
    "PlacementError",
    "RepairError",
    "RepairTimeout",
    "RouteTable",
    "RoutingError",
    "ShapeError",
    "eplb",
    "fp8",
    "get_dispatch_layout",
]
