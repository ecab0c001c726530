"""Tells prefill workers to let go of KV blocks that nobody will fetch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_conductor._errors import WorkerError, WorkerRefused
from mooncake_conductor.upstream import WorkerClient

__all__ = ["RELEASE_PATH", "RELEASE_TIMEOUT_S", "KvReleases"]

RELEASE_PATH = "/kv/release"
RELEASE_TIMEOUT_S = 2.0
# At the end of the conductor: what is not told by then, the workers find out by their own deadline.
CLOSE_TIMEOUT_S = 1.0
# Engines without this endpoint answer so; their own deadline frees the blocks.
NO_SUCH_ENDPOINT = (404, 405)

log = logging.getLogger(__name__)


class KvReleases:
    """Releases in the background, so that no client waits for one. Use inside one event loop; ``close`` it
    there, before the client's connections."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._running: set[asyncio.Task[None]] = set()

    @contextmanager
    def unless_handed_over(self, worker: str, transfer_id: str) -> Iterator[None]:
        """Release ``transfer_id`` if what is inside fails or is cancelled."""
        try:
            yield
        except BaseException:
            self.start(worker, transfer_id)
            raise

    def start(self, worker: str, transfer_id: str) -> None:
        """Tell ``worker`` to let go of what it holds for ``transfer_id``; returns at once.

        A worker that does not answer within 2 s, or cannot do it, is not asked again.
        """
        task = asyncio.create_task(self._release(worker, transfer_id))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Give running releases up to 1 s, then cancel them."""
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _release(self, worker: str, transfer_id: str) -> None:
        request = {"transfer_id": transfer_id}
        try:
            await self._client.call(worker, RELEASE_PATH, request, RELEASE_TIMEOUT_S)
        except WorkerError as error:
            unexpected = isinstance(error, WorkerRefused) and error.status not in NO_SUCH_ENDPOINT
            level = logging.WARNING if unexpected else logging.DEBUG
            log.log(level, "KV blocks of %s wait for the worker's own deadline: %s", transfer_id, error)
