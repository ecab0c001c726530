"""Moves bytes between Mooncake engines over TCP.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_tcp.options import TcpOptions

__all__ = ["TcpOptions"]
