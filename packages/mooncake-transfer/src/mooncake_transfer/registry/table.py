"""Entries that expire: what the in-process registry is, and what the HTTP one keeps."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping

__all__ = ["ExpiringTable"]


class ExpiringTable:
    """A dictionary whose entries vanish when they are not renewed. Thread-safe.

    ``clock`` gives seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[bytes, float]] = {}
        # When to look at a key again. One item per key, however often it is renewed, removed and put: who was
        # renewed meanwhile goes back into the heap with the new time.
        self._due: list[tuple[float, str]] = []
        self._queued: set[str] = set()

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._entries)

    def get(self, key: str) -> bytes | None:
        """The value of ``key``, or None."""
        with self._lock:
            self._expire()
            return self._value(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        """Every entry whose key starts with ``prefix``, in order of keys."""
        with self._lock:
            self._expire()
            found = {key: self._value(key) for key in sorted(self._entries) if key.startswith(prefix)}
            return {key: value for key, value in found.items() if value is not None}

    def replace(self, key: str, fits: Callable[[bytes | None], bool], new: bytes, ttl_s: float) -> bool:
        """Put ``new`` in the place of a value (None: no entry) that ``fits``; says whether it did."""
        with self._lock:
            self._expire()
            if not fits(self._value(key)):
                return False
            self._entries[key] = (new, self._clock() + ttl_s)
            if key not in self._queued:
                self._queued.add(key)
                heapq.heappush(self._due, (self._clock() + ttl_s, key))
            return True

    def renew(self, entries: Mapping[str, Callable[[bytes | None], bool]], ttl_s: float) -> set[str]:
        """Keep each entry whose value fits for another ``ttl_s``; the other keys are returned."""
        with self._lock:
            self._expire()
            lost = {key for key, fits in entries.items() if not self._holds(key, fits)}
            for key in entries.keys() - lost:
                self._entries[key] = (self._entries[key][0], self._clock() + ttl_s)
            return lost

    def remove(self, entries: Mapping[str, Callable[[bytes | None], bool]]) -> None:
        """Remove each entry whose value fits."""
        with self._lock:
            for key, fits in entries.items():
                if self._holds(key, fits):
                    del self._entries[key]

    def _holds(self, key: str, fits: Callable[[bytes | None], bool]) -> bool:
        value = self._value(key)
        return value is not None and fits(value)

    def _value(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        # An entry that was given a shorter time than before is late in the heap, so its own time counts.
        return entry[0] if entry is not None and entry[1] > self._clock() else None

    def _expire(self) -> None:
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            _, key = heapq.heappop(self._due)
            expiry_s = self._entries[key][1] if key in self._entries else now_s
            if expiry_s > now_s:
                heapq.heappush(self._due, (expiry_s, key))
            else:
                self._entries.pop(key, None)
                self._queued.discard(key)
