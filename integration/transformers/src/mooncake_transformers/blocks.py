"""Waiting for KV blocks, and giving them back when whoever uses them is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from mooncake_transformers._errors import KVPoolExhausted
from mooncake_transformers.kv_pool import KVPool

__all__ = ["BlockWaiters", "release_when_done"]


class BlockWaiters:
    """Hands out blocks of ``pool`` to requests, first come, first served: a large request is not starved by
    small ones.

    To be used in one event loop; blocks may be released in any thread.
    """

    def __init__(self, pool: KVPool, *, wait_s: float, max_waiting: int) -> None:
        self._pool = pool
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()
        self._loop = asyncio.get_running_loop()
        pool.on_freed(self._blocks_freed)

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting)

    async def take(self, count: int) -> list[int]:
        """``count`` blocks with one user each. Raises KVPoolExhausted when they are not free in time."""
        if not self._waiting or count == 0:
            blocks = self._pool.try_allocate(count)
            if blocks is not None:
                return blocks
        if len(self._waiting) >= self._max_waiting:
            raise KVPoolExhausted(
                f"{len(self._waiting)} requests wait for KV blocks already; "
                "retry later, or raise kv_pool_bytes"
            )
        place: asyncio.Future[list[int]] = self._loop.create_future()
        entry = (count, place)
        self._waiting.append(entry)
        try:
            return await asyncio.wait_for(asyncio.shield(place), self._wait_s)
        except asyncio.TimeoutError:
            if place.done():
                return place.result()
            raise KVPoolExhausted(
                f"{count} KV blocks did not become free within {self._wait_s:g} s "
                f"({self._pool.free_count} of {self._pool.block_count} are free); "
                "retry later, or raise kv_pool_bytes"
            ) from None
        except asyncio.CancelledError:
            if place.done():
                self._pool.release(place.result())
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
                # Whoever stands behind may fit where this one did not.
                self._serve()

    def close(self) -> None:
        """Stop listening to the pool."""
        self._pool.on_freed(None)

    def _blocks_freed(self) -> None:
        self._loop.call_soon_threadsafe(self._serve)

    def _serve(self) -> None:
        while self._waiting:
            count, place = self._waiting[0]
            blocks = self._pool.try_allocate(count)
            if blocks is None:
                return
            self._waiting.popleft()
            place.set_result(blocks)


def release_when_done(pool: KVPool, blocks: Sequence[int], user: Future[Any]) -> None:
    """Release the blocks once ``user``, who reads or writes them in another thread, is done, well or not."""
    user.add_done_callback(lambda _: pool.release(blocks))
