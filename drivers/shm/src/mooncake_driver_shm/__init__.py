"""Moves bytes between Mooncake engines on one host through shared memory.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_shm.options import ShmOptions

__all__ = ["ShmOptions"]
