"""Moves bytes between Mooncake engines through NIXL's agents and UCX.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_nixl.options import NixlOptions

__all__ = ["NixlOptions"]
