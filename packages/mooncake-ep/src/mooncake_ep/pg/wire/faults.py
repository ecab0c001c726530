"""Faults on purpose, at named points of an operation; see core/pg/faults.hpp."""

from __future__ import annotations

import enum
import os
import signal

__all__ = ["FaultPlan", "Point"]


class Point(enum.IntEnum):
    """By the numbers of `mooncake_ep.pg.FaultPoint`."""

    BEFORE_PUBLISH = 1
    AFTER_PUBLISH = 2
    WHILE_READING = 3
    BEFORE_RESULT = 4
    BEFORE_RETURN = 5
    BEFORE_JOIN = 6


class FaultPlan:
    """Kills or stops this process when it comes to a point for the nth time. Nothing unless `set`."""

    def __init__(self) -> None:
        self._point, self._left, self._kill = 0, 0, True

    def set(self, point: int, nth: int, kill: bool) -> None:
        """Plan one."""
        self._point, self._left, self._kill = point, nth, kill

    def at(self, point: Point) -> None:
        """This process is at a point."""
        if point != self._point:
            return
        self._left -= 1
        if self._left == 0:
            self._point = 0
            os.kill(os.getpid(), signal.SIGKILL if self._kill else signal.SIGSTOP)
