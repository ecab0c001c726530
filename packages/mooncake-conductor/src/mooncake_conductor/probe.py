"""Asks every worker every second how it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from mooncake_conductor._errors import WorkerError, WorkerUnreachable
from mooncake_conductor.config import ConductorConfig
from mooncake_conductor.upstream import WorkerClient
from mooncake_conductor.workers import Worker, WorkerInfo, WorkerRegistry

__all__ = ["HealthProbes"]

log = logging.getLogger(__name__)


class HealthProbes:
    """One probing task per worker. ``on_started`` hears of each incarnation of a worker when it is first seen
    up."""

    def __init__(
        self,
        config: ConductorConfig,
        registry: WorkerRegistry,
        client: WorkerClient,
        on_started: Callable[[Worker, WorkerInfo], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._client = client
        self._on_started = on_started
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def watch(self, worker: Worker) -> None:
        """Probe the worker now, and again and again until it is forgotten. Returns after the first probe."""
        await self.probe(worker)
        if worker.url not in self._tasks and self._registry.get(worker.url) is worker:
            self._tasks[worker.url] = asyncio.create_task(
                self._keep_probing(worker), name=f"probe {worker.url}"
            )

    async def probe(self, worker: Worker) -> None:
        """Ask once; the registry knows the outcome when this returns."""
        was = worker.state
        try:
            info = await self._client.describe(worker.url, self._config.probe_timeout_s)
        except WorkerError as error:
            gone = isinstance(error, WorkerUnreachable) and error.refused
            self._registry.failed(worker, str(error), time.monotonic(), gone=gone)
        else:
            if self._registry.answered(worker, info, time.monotonic()):
                self._on_started(worker, info)
        if worker.state != was:
            log.info("worker %s is %s %s", worker.url, worker.state, worker.reason)

    def forget(self, worker: Worker) -> None:
        """Stop probing the worker."""
        task = self._tasks.pop(worker.url, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop probing everybody."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_probing(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._config.probe_interval_s)
            try:
                await self.probe(worker)
            except Exception:
                # One answer that breaks the prober must not end the probing of this worker.
                log.exception("probing worker %s failed", worker.url)
