"""Moves bytes between Mooncake engines over AWS EFA, and over whatever else libfabric reaches by RMA.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_efa.options import EfaOptions

__all__ = ["EfaOptions"]
