"""Moves memory of Ascend NPUs, and main memory, between Mooncake engines by HCCS and RoCE.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_ascend.options import AscendOptions

__all__ = ["AscendOptions"]
