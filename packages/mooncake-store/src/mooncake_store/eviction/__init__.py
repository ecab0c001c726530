"""Which object goes when room is needed."""

from mooncake_store.eviction.clock import Clock

__all__ = ["Clock"]
