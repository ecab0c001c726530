"""KV-cache-aware scheduler and OpenAI-compatible gateway for disaggregated prefill and decode."""
