"""What a worker counts, for Prometheus. One registry per worker, so that several can live in one process."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["WorkerMetrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class WorkerMetrics:
    """The metrics of one worker, all of them named ``mooncake_worker_*``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests by endpoint and HTTP status.", "endpoint", "status"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests prefilled here.")
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens whose KV cache came from the store."
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens produced here.")
        self.blocks_stored = self._counter("blocks_stored", "KV blocks this worker put into the store.")
        self.blocks_evicted = self._counter("blocks_evicted", "KV blocks that left this worker's segment.")
        self.store_failures = self._counter(
            "store_failures", "Store calls that failed and were done without.", "call"
        )
        self.handoff_bytes = self._counter(
            "handoff_bytes", "KV bytes fetched from prefill workers.", "driver"
        )
        self.handoff_failures = self._counter("handoff_failures", "Hand-offs that failed.", "reason")
        self.store_seconds = self._histogram(
            "store_seconds", "Time to fetch from, or add to, the store.", "call"
        )
        self.prefill_seconds = self._histogram("prefill_seconds", "Time the model took for a prompt.")
        self.handoff_seconds = self._histogram("handoff_seconds", "Time to fetch the KV cache of a prompt.")
        self.token_seconds = self._histogram("token_seconds", "Time between two tokens of an answer.")

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value ``read`` gives when somebody asks."""
        Gauge(f"mooncake_worker_{name}", text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mooncake_worker_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"mooncake_worker_{name}", text, labels, registry=self.registry, buckets=_SECONDS)
