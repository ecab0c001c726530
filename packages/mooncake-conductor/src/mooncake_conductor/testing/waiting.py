"""Waits in tests: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]

POLL_S = 0.005


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Return as soon as ``condition()`` is true. Raises AssertionError that says ``what`` never was."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {timeout_s:g} s it is still not so that {what}")
        time.sleep(POLL_S)
