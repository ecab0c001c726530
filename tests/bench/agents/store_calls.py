"""What every store's agent shares: which calls are timed, and on which values."""

from __future__ import annotations

import abc
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import wire

SEGMENT_BYTES = 1 << 30
BUFFER_BYTES = 64 << 20
KEPT_BYTES = 256 << 20  # values that gets go round over: more than caches hold, where values are large
MOST_KEPT = 64


class Party(abc.ABC):
    """A client of one store. Subclasses say how the store is called; its memory is ``BUFFER_BYTES``.

    Values of a batch lie one after the other in that memory, a single one at its start.
    """

    pids: list[int]

    def __init__(self) -> None:
        self._names = itertools.count()

    @abc.abstractmethod
    def put(self, keys: list[str], size: int) -> None:
        """Store values of one size under keys that do not exist."""

    @abc.abstractmethod
    def get(self, key: str, size: int) -> None:
        """Read a value into memory."""

    @abc.abstractmethod
    def get_many(self, keys: list[str], size: int) -> None:
        """Read values into memory in one call."""

    @abc.abstractmethod
    def get_bytes(self, key: str) -> bytes:
        """A value as bytes of Python."""

    @abc.abstractmethod
    def exist(self, keys: list[str]) -> None:
        """Ask in one call whether values exist; all do."""

    @abc.abstractmethod
    def remove(self, keys: list[str]) -> None:
        """Remove values."""

    @abc.abstractmethod
    def fill(self, data: bytes) -> None:
        """Write to the start of the memory."""

    def check(self) -> dict[str, object]:
        """Prove that bytes arrive: a pattern there and back."""
        pattern = os.urandom(1 << 20)
        self.fill(pattern)
        self.put(["pattern"], len(pattern))
        assert self.get_bytes("pattern") == pattern, "bytes were changed on the way"
        self.remove(["pattern"])
        return {"pids": self.pids}

    def measure(self, op: str, size: int, count: int, seconds: float) -> dict[str, Any]:
        """Time one call of the store on ``count`` values."""
        if op == "put":
            return self._measure_puts(size, count, seconds)
        keys = self._fresh(max(count, 2, min(MOST_KEPT, KEPT_BYTES // size)))
        for start in range(0, len(keys), many := max(1, BUFFER_BYTES // size)):
            self.put(keys[start : start + many], size)
        turns = itertools.cycle(keys)
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: self.get(next(turns), size),
            "batch get": lambda: self.get_many(keys, size),
            "get as bytes": lambda: self.get_bytes(next(turns)),
            "exist": lambda: self.exist(keys),
        }
        call = calls["batch get" if op == "get" and count > 1 else op]
        try:
            return wire.time_calls(lambda: call() and None, seconds, self.pids)
        finally:
            self.remove(keys)

    def _measure_puts(self, size: int, count: int, seconds: float) -> dict[str, Any]:
        there: list[str] = []

        def call() -> int:
            if len(there) * size >= KEPT_BYTES or len(there) >= 100 * MOST_KEPT:
                self.remove(there)
                there.clear()
            keys = self._fresh(count)
            started = time.perf_counter_ns()
            self.put(keys, size)
            taken = time.perf_counter_ns() - started
            there.extend(keys)
            return taken

        try:
            return wire.time_calls(call, seconds, self.pids)
        finally:
            self.remove(there)

    def _fresh(self, count: int) -> list[str]:
        return [f"block-{next(self._names):035d}" for _ in range(count)]
