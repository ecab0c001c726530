"""Puts the parts of a conductor together: workers, probes, events, index, policy, proxy."""

from __future__ import annotations

import asyncio
from typing import Any

from mooncake_conductor.config import ConductorConfig, worker_url
from mooncake_conductor.feeds import EventFeeds
from mooncake_conductor.index import ClusterIndex
from mooncake_conductor.metrics import Metrics
from mooncake_conductor.plugins import find_policy
from mooncake_conductor.probe import HealthProbes
from mooncake_conductor.proxy import Proxy
from mooncake_conductor.upstream import WorkerClient
from mooncake_conductor.workers import Worker, WorkerInfo, WorkerRegistry

__all__ = ["Conductor"]


class Conductor:
    """A running conductor without its HTTP face. Create, ``start`` and ``close`` it inside one event loop.

    Raises ConfigError when the policy does not exist.

    Attributes:
        ending: set when requests that still run are to end in an error.
    """

    def __init__(self, config: ConductorConfig) -> None:
        policy = find_policy(config.policy)
        self.config = config
        self.ending = asyncio.Event()
        self.metrics = Metrics()
        self.index = ClusterIndex()
        self.registry = WorkerRegistry(
            silence_limit_s=config.silence_limit_s, retry_after_s=config.retry_after_s
        )
        self.registry.on_forgotten = self._on_forgotten
        self._client = WorkerClient(connect_timeout_s=config.connect_timeout_s)
        self._feeds = EventFeeds(config, self.index, self.metrics)
        self._probes = HealthProbes(config, self.registry, self._client, self._on_started)
        self.proxy = Proxy(config, self.registry, self.index, policy, self._client, self.metrics)

    async def start(self) -> None:
        """Probe the configured workers once and go on probing. Workers that are away now are taken when they
        come."""
        await asyncio.gather(*(self.register(url) for url in self.config.workers))

    async def close(self) -> None:
        """Stop everything that runs."""
        await self._probes.close()
        await self._feeds.close()
        await self.proxy.close()
        await self._client.close()

    async def register(self, url: str) -> Worker:
        """Add a worker and probe it. Raises ConfigError when ``url`` is none."""
        worker = self.registry.add(worker_url(url))
        await self._probes.watch(worker)
        return worker

    def unregister(self, url: str) -> Worker | None:
        """Let a worker drain and forget it. None when it is not known. Raises ConfigError when ``url`` is
        none."""
        return self.registry.remove(worker_url(url))

    def describe(self, worker: Worker) -> dict[str, Any]:
        """What ``GET /workers`` shows of a worker."""
        info = worker.info
        known = {name: getattr(info, name) for name in info.__struct_fields__} if info is not None else {}
        return {
            **known,
            "url": worker.url,
            "state": "draining" if worker.draining else worker.state,
            "reason": worker.reason,
            "requests": worker.requests,
            "queued_tokens": worker.queued_tokens,
            "index_blocks": self.index.block_count(worker.url),
        }

    def render_metrics(self) -> bytes:
        """The Prometheus exposition text, with the gauges as of now."""
        for gauge in (self.metrics.worker_up, self.metrics.queued_tokens, self.metrics.index_blocks):
            gauge.clear()  # so that no worker that left is still shown
        for worker in self.registry:
            role = worker.info.role if worker.info is not None else "unknown"
            self.metrics.worker_up.labels(worker.url, role).set(worker.state == "up")
            self.metrics.queued_tokens.labels(worker.url).set(worker.queued_tokens)
            self.metrics.index_blocks.labels(worker.url).set(self.index.block_count(worker.url))
        return self.metrics.render()

    def _on_started(self, worker: Worker, info: WorkerInfo) -> None:
        self.metrics.worker_starts.labels(worker.url).inc()
        self._feeds.follow(worker.url, info)

    def _on_forgotten(self, worker: Worker) -> None:
        self._probes.forget(worker)
        self._feeds.forget(worker.url)
