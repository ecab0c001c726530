"""How long the bytes of one read or write may take to move."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SLOWEST_BYTES_PER_S", "TimeBudget"]

# A quarter of what a link of 1 Gbit/s moves: what goes slower than that is not waited for.
SLOWEST_BYTES_PER_S = 32 << 20


class TimeBudget:
    """Time for the tries that one read or write has at different segments. Not thread-safe.

    A try that others may follow gets half of what is left of ``timeout_s``, the last one all of it. Besides,
    each gets the time in which its bytes go over the slowest link, and only what it took beyond that is
    taken from what others have.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] | None = None) -> None:
        """``clock``: as ``time.monotonic``, which it is by default."""
        self._left_s = timeout_s
        self._clock = clock or time.monotonic
        self._own_s = 0.0  # when the try has taken its bytes' time

    def begin(self, nbytes: int, tries: int) -> float:
        """Until when, of the clock, ``nbytes`` may move, of ``tries`` that are left with this one."""
        self._own_s = self._clock() + nbytes / SLOWEST_BYTES_PER_S
        return self._own_s + (self._left_s if tries <= 1 else self._left_s / 2)

    def spend(self, late_s: float) -> None:
        """A try that somebody else timed took so much longer than its bytes' time."""
        self._left_s = max(0.0, self._left_s - late_s)

    def end(self) -> None:
        """The try is over."""
        self.spend(max(0.0, self._clock() - self._own_s))
