"""Which worker holds which prefix, exactly, learnt from their KV events."""

from mooncake_conductor.index.cluster import ClusterIndex
from mooncake_conductor.index.prefix import PrefixIndex

__all__ = ["ClusterIndex", "PrefixIndex"]
