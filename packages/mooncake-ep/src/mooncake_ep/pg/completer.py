"""Futures of operations: one thread of the process waits for those that somebody asked for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

__all__ = ["complete_later"]

_jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_start = threading.Lock()
_owner = 0  # process in which the thread runs: a forked child has none


def complete_later(job: Callable[[], None]) -> None:
    """Run `job`, which waits for an operation and does not raise, after those given before."""
    global _owner
    with _start:
        if _owner != os.getpid():
            threading.Thread(target=_run, name="mooncake-pg-futures", daemon=True).start()
            _owner = os.getpid()
    _jobs.put(job)


def _run() -> None:
    while True:
        _jobs.get()()
