"""Prometheus metrics of a conductor, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["Metrics"]

PREFIX = "mooncake_conductor"
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60)
DECISION_BUCKETS_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)


class Metrics:
    """All metrics of one conductor. Names start with ``mooncake_conductor_``."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Generation requests answered", "endpoint", "status")
        self.ttft = self._histogram(
            "ttft_seconds",
            "From a request to its first token: for a stream, to its arrival here; for a whole answer, to "
            "the answer of its prefill (not counted when one worker does both)",
            TTFT_BUCKETS_S,
        )
        self.decision = self._histogram("decision_seconds", "Index look-up and placement", DECISION_BUCKETS_S)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of all placed prompts")
        self.matched_tokens = self._counter(
            "matched_tokens", "Prompt tokens held by the chosen prefill worker"
        )
        self.rejected = self._counter("rejected", "Requests not served", "reason")
        self.retries = self._counter("retries", "Phases tried again after a worker failed", "phase")
        self.broken_streams = self._counter(
            "broken_streams", "Streams that ended in an error event", "reason"
        )
        self.clients_gone = self._counter("clients_gone", "Requests given up because the client went away")
        self.worker_up = self._gauge("worker_up", "1 when the worker answers its probes", "worker", "role")
        self.worker_starts = self._counter(
            "worker_starts", "Incarnations of a worker that were seen up", "worker"
        )
        self.queued_tokens = self._gauge("queued_tokens", "Tokens of work in flight", "worker")
        self.index_blocks = self._gauge("index_blocks", "Prefix blocks known of a worker", "worker")
        self.event_batches = self._counter("event_batches", "KV event batches taken in", "worker")
        self.event_gaps = self._counter("event_gaps", "Gaps in a worker's KV event numbers", "worker")
        self.views_cleared = self._counter(
            "views_cleared", "Times a worker's view was lost", "worker", "reason"
        )

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", help_text, labels, registry=self._registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", help_text, buckets=buckets, registry=self._registry)
