"""Keeps the prefix index fed: one subscription for every worker that is up and sends KV events."""

from __future__ import annotations

import asyncio
import logging

import zmq.asyncio

from mooncake_conductor.config import ConductorConfig
from mooncake_conductor.index import ClusterIndex
from mooncake_conductor.metrics import Metrics
from mooncake_conductor.subscriber import EventSubscriber, LossReason, reachable_endpoint
from mooncake_conductor.workers import WorkerInfo
from mooncake_store.kv_events.wire import EventBatch

__all__ = ["EventFeeds"]

log = logging.getLogger(__name__)


class EventFeeds:
    """The subscriptions of a conductor. Use inside one event loop; ``close`` it there."""

    def __init__(self, config: ConductorConfig, index: ClusterIndex, metrics: Metrics) -> None:
        self._config = config
        self._index = index
        self._metrics = metrics
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, worker: str, info: WorkerInfo) -> None:
        """Start anew with this incarnation of the worker: what was known of an earlier one is forgotten."""
        self.forget(worker)
        self._index.attach(worker, info.model, info.block_tokens)
        endpoint = reachable_endpoint(info.kv_events, worker)
        if endpoint is None:
            return
        subscriber = EventSubscriber(
            self._context,
            endpoint,
            reachable_endpoint(info.kv_events_replay, worker),
            _WorkerSink(worker, self._index, self._metrics),
            replay_timeout_s=self._config.replay_timeout_s,
            replay_interval_s=self._config.replay_interval_s,
        )
        self._tasks[worker] = asyncio.create_task(self._run(worker, subscriber), name=f"kv-events {worker}")

    def forget(self, worker: str) -> None:
        """Stop following the worker and forget what it holds."""
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._index.detach(worker)

    async def close(self) -> None:
        """Stop following everybody."""
        for worker in list(self._tasks):
            self.forget(worker)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _run(self, worker: str, subscriber: EventSubscriber) -> None:
        try:
            await subscriber.run()
        except Exception:
            # The end of a task: without this, nobody would hear of it.
            log.exception(
                "following the KV events of %s ended; it counts as holding nothing until it restarts", worker
            )
            self._index.clear(worker)


class _WorkerSink:
    """Brings one worker's events into the index, and counts."""

    def __init__(self, worker: str, index: ClusterIndex, metrics: Metrics) -> None:
        self._worker = worker
        self._index = index
        self._metrics = metrics

    def on_batch(self, batch: EventBatch) -> None:
        self._index.apply(self._worker, batch)
        self._metrics.event_batches.labels(self._worker).inc()

    def on_gap(self) -> None:
        self._metrics.event_gaps.labels(self._worker).inc()

    def on_lost(self, reason: LossReason) -> None:
        self._index.clear(self._worker)
        self._metrics.views_cleared.labels(self._worker, reason).inc()
