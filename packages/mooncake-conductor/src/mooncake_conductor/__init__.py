"""KV-cache-aware scheduler and OpenAI-compatible gateway for disaggregated prefill and decode.

A cluster runs ``mooncake conductor``; engines tell it of their KV cache by :mod:`mooncake_store.kv_events`.
"""

from mooncake_conductor.config import ConductorConfig

__all__ = ["ConductorConfig"]
