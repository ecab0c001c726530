"""Where a region's bytes live: memory of the engine, memory the user brings, files and block devices."""

from mooncake_transfer._memory.description import HOST, Memory, MemoryKind
from mooncake_transfer._memory.files import DeviceSource, FileSource, device_source, file_source
from mooncake_transfer._memory.foreign import MemoryRange, wrap
from mooncake_transfer._memory.numa import node_of, nodes_with_memory
from mooncake_transfer._memory.overlap import RegionMap
from mooncake_transfer._memory.shareable import allocate_shareable, available_bytes

__all__ = [
    "HOST",
    "DeviceSource",
    "FileSource",
    "Memory",
    "MemoryKind",
    "MemoryRange",
    "RegionMap",
    "allocate_shareable",
    "available_bytes",
    "device_source",
    "file_source",
    "node_of",
    "nodes_with_memory",
    "wrap",
]
