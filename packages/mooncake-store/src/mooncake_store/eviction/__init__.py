"""Which object goes when room is needed."""

from mooncake_store.eviction.contract import EvictionInfo, EvictionPolicy, Numbers
from mooncake_store.eviction.finding import find_eviction

__all__ = ["EvictionInfo", "EvictionPolicy", "Numbers", "find_eviction"]
