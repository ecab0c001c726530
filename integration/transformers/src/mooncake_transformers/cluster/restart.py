"""When a process that died may be started again: a pure function of the times at which it died."""

from __future__ import annotations

__all__ = ["RestartBudget"]

WINDOW_S = 60.0
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0


class RestartBudget:
    """Counts one process's deaths in the last minute; each one doubles the wait before the next start.

    Knows no clock: the caller says what time it is, on any monotonic clock, in seconds.
    """

    def __init__(self, max_per_minute: int) -> None:
        self._max_per_minute = max_per_minute
        self._deaths_s: list[float] = []

    def delay_after_death(self, now_s: float) -> float | None:
        """Record a death at ``now_s``; return seconds to wait before the next start, or None for give up."""
        self._deaths_s = [death_s for death_s in self._deaths_s if now_s - death_s < WINDOW_S]
        self._deaths_s.append(now_s)
        if len(self._deaths_s) > self._max_per_minute:
            return None
        return float(min(FIRST_DELAY_S * 2 ** (len(self._deaths_s) - 1), MAX_DELAY_S))
