"""Threads for calls that may hang: whoever waits gives up at a deadline, and the program can still end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from mooncake_store._errors import TierTimeout

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """Up to ``count`` threads, started as they are needed.

    Not a ThreadPoolExecutor: the interpreter waits at its end for the threads of those, for ever when one
    hangs in a file system.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a thread call it."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - who waits shall get it, whatever it is
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise TierTimeout("the tier has been closed")
            if not self._idle and len(self._threads) < self._count:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._tasks.put(run)
        return future

    def run_all(self, calls: Sequence[Callable[[], T]], timeout_s: float) -> list[T | Exception]:
        """What each call returned or raised; TierTimeout for those that did not end in time."""
        deadline_s = time.monotonic() + timeout_s
        futures: list[Future[T]] = [self.submit(call) for call in calls]
        ended: list[T | Exception] = []
        for future in futures:
            found = outcome(future, deadline_s)
            ended.append(found)
        return ended

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            task = self._tasks.get()
            with self._lock:
                self._idle -= 1
            if task is None:
                return
            task()

    def close(self, timeout_s: float) -> None:
        """End the threads; one that hangs is left behind."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._tasks.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def outcome(future: Future[T], deadline_s: float) -> T | Exception:
    """What came of it, or TierTimeout after the deadline."""
    try:
        return future.result(max(0.0, deadline_s - time.monotonic()))
    except FutureTimeout:
        if future.done():  # the call itself raised a TimeoutError
            error = future.exception()
            assert isinstance(error, Exception)
            return error
        future.cancel()
        return TierTimeout("it did not end before its deadline")
    except Exception as error:  # noqa: BLE001 - the caller decides, call by call
        return error
