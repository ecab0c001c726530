"""Moves bytes between Mooncake engines through a pool of CXL memory that they all map.

The engine finds the driver by itself. ``Pool`` gives memory of a pool by hand, and finds again by name what
was kept in it.
"""

from mooncake_driver_cxl.options import CxlOptions
from mooncake_driver_cxl.pool import Block, BlockInfo, Pool

__all__ = ["Block", "BlockInfo", "CxlOptions", "Pool"]
