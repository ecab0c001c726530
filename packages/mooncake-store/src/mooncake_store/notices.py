"""Tells the user which of this client's values have gone, in the master's order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from mooncake_store.keys import object_digests
from mooncake_store.protocol import Notice

__all__ = ["Notices"]

EvictedHandler = Callable[[list[bytes]], None]
ClearedHandler = Callable[[], None]

log = logging.getLogger(__name__)


class Notices:
    """Takes notices from the master's answers and hands them to handlers, on one thread, outside every lock.

    Several answers may carry the same notices; their numbers tell which are new.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._changed = threading.Condition()
        self._epoch = 0
        self._seen = 0
        self._queue: deque[list[bytes] | None] = deque()  # None: the whole segment was emptied
        self._queued = self._handled = 0
        self._evicted: list[EvictedHandler] = []
        self._cleared: list[ClearedHandler] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def on_evicted(self, handler: EvictedHandler) -> None:
        """Call ``handler`` with the keys of each batch of notices from now on."""
        with self._changed:
            self._evicted.append(handler)
            self._start()

    def on_cleared(self, handler: ClearedHandler) -> None:
        """Call ``handler`` when the whole segment has been emptied."""
        with self._changed:
            self._cleared.append(handler)
            self._start()

    @property
    def seen(self) -> int:
        """Number of the last notice taken."""
        return self._seen

    @property
    def wanted(self) -> bool:
        """Whether anybody listens."""
        return self._thread is not None

    def restart(self, epoch: int, *, cleared: bool) -> None:
        """The client has (re)joined a master: notices of before are void, and so is what the segment held."""
        with self._changed:
            self._epoch, self._seen = epoch, 0
            if cleared and self._thread is not None:
                self._enqueue(None)

    def accept(self, epoch: int, notices: list[Notice]) -> None:
        """Take the notices of one answer of the master of ``epoch``."""
        with self._changed:
            if epoch != self._epoch:
                return
            new = [notice for notice in notices if notice.number > self._seen]
            if not new:
                return
            self._seen = new[-1].number
            # Other tenants' values may lie in this segment; their keys mean nothing here.
            keys = [n.key for n in new if object_digests(self._tenant, [n.key]) == n.digest]
            if keys and self._thread is not None:
                self._enqueue(keys)

    def flush(self, timeout_s: float) -> None:
        """Wait until handlers have had everything taken so far.

        It gives up after ``timeout_s`` with a warning: a handler waits for something that its caller holds.
        """
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            target = self._queued
            if not self._changed.wait_for(lambda: self._handled >= target or self._closed, timeout_s):
                log.warning(
                    "an on_evicted handler has not returned within %g s; a put goes on without it", timeout_s
                )

    def close(self, timeout_s: float) -> None:
        """End the thread. What has not been handed out yet is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("an on_evicted handler still runs after the store was closed")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mooncake-store-notices", daemon=True)
            self._thread.start()

    def _enqueue(self, item: list[bytes] | None) -> None:
        self._queue.append(item)
        self._queued += 1
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                item = self._queue.popleft()
            self._hand_out(item)
            with self._changed:
                self._handled += 1
                self._changed.notify_all()

    def _hand_out(self, keys: list[bytes] | None) -> None:
        calls: list[Callable[[], None]]
        if keys is None:
            calls = list(self._cleared)
        else:
            calls = [partial(handler, list(keys)) for handler in self._evicted]
        for call in calls:
            try:
                call()
            except Exception:
                # The handler is the user's code; its failure must not end the notices to others.
                log.exception("an on_evicted or on_cleared handler failed")
