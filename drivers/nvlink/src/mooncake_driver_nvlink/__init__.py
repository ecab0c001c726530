"""Moves GPU memory between Mooncake engines, within a process, a host and an NVLink domain.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_nvlink.options import NvlinkOptions

__all__ = ["NvlinkOptions"]
