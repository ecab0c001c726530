"""Moves batches of bytes between registered memory of processes, over any fabric that has a driver."""

from mooncake_transfer.config import TransferConfig
from mooncake_transfer.drivers import DriverStatus
from mooncake_transfer.engine import TransferEngine
from mooncake_transfer.peer import Caller, Peer
from mooncake_transfer.region import Region, RemoteRegion
from mooncake_transfer.transfer import Transfer

__all__ = [
    "Caller",
    "DriverStatus",
    "Peer",
    "Region",
    "RemoteRegion",
    "Transfer",
    "TransferConfig",
    "TransferEngine",
]
