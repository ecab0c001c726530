"""Processes of a test that are made to stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stop_process", "stopped_process"]

STOP_TIMEOUT_S = 10.0
POLL_S = 0.001


def stop_process(pid: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop a child (SIGSTOP), and wait until none of its threads runs; its sockets and memory stay.

    A thread that runs on another core goes on for a while after the signal was sent. Raises TimeoutError.
    """
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until_s:
            raise TimeoutError(f"process {pid} did not stop within {timeout_s:g} s")
        time.sleep(POLL_S)


@contextmanager
def stopped_process(pid: int) -> Iterator[None]:
    """Have a child stand still meanwhile. Raises TimeoutError."""
    try:
        stop_process(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
