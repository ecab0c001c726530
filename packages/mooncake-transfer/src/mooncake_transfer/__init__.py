"""Moves batches of bytes between registered memory of processes, over any fabric that has a driver."""

from mooncake_transfer.config import RailConfig, TransferConfig
from mooncake_transfer.drivers import DriverStatus
from mooncake_transfer.engine import TransferEngine
from mooncake_transfer.grid import Grid, GridSide
from mooncake_transfer.memory import FileSource, MemoryKind, MemoryRange
from mooncake_transfer.peer import Caller, Peer
from mooncake_transfer.rails import RailStatus
from mooncake_transfer.region import Region, RemoteRegion
from mooncake_transfer.transfer import Transfer, TransferState, TransferStatus

__all__ = [
    "Caller",
    "DriverStatus",
    "FileSource",
    "Grid",
    "GridSide",
    "MemoryKind",
    "MemoryRange",
    "Peer",
    "RailConfig",
    "RailStatus",
    "Region",
    "RemoteRegion",
    "Transfer",
    "TransferConfig",
    "TransferEngine",
    "TransferState",
    "TransferStatus",
]
