"""Turns the signals that ask a program to stop into an event, and into an exception only where safe."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopSignal", "stop_on_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Set by the first SIGINT, SIGTERM or SIGHUP. Made by ``stop_on_signals``."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._is_raising = False

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside this block a signal raises KeyboardInterrupt, also one that came earlier.

        For code that blocks in a library and owns nothing that an exception at any moment could leak.
        """
        self._is_raising = True
        try:
            # Checked after the flag is set: a signal is then either seen here or raises by itself.
            if self.event.is_set():
                raise KeyboardInterrupt
            yield
        finally:
            self._is_raising = False

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.event.set()
        if self._is_raising:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Inside, signals set the event instead of ending the program. For the main thread only."""
    stop = StopSignal()
    before = {signum: signal.signal(signum, stop._receive) for signum in SIGNALS}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
