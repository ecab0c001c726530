"""KV-cache-aware scheduler and OpenAI-compatible gateway for disaggregated prefill and decode.

Engines need :mod:`mooncake_conductor.events` and :class:`KVEventPublisher`; a cluster runs ``mooncake
conductor``.
"""

from mooncake_conductor.config import ConductorConfig
from mooncake_conductor.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from mooncake_conductor.publisher import KVEventPublisher

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "ConductorConfig",
    "EventBatch",
    "KVEventPublisher",
]
