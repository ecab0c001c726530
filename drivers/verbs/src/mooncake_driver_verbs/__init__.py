"""Moves bytes between Mooncake engines over RDMA: InfiniBand, RoCE and what else speaks verbs.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_verbs.options import VerbsOptions

__all__ = ["VerbsOptions"]
