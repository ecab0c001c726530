"""What one client of the store has done."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from mooncake_store.telemetry.latency import Latencies, Latency

__all__ = ["ClientCounters", "ClientNumbers"]


# Name, number, failures, seconds and buckets of calls; hits, misses, bytes read, values stored, bytes
# written.
Counts = tuple[list[tuple[str, int, int, float, list[int]]], tuple[int, int, int, int, int]]


class ClientNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one client, since it was opened.

    Attributes:
        hits: keys whose values were found and read whole.
        misses: keys asked for that were not there, or were lost while they were read.
        read_bytes: bytes moved from segments.
        stored: values stored.
        kept: values not stored because their key was taken.
        refused: values not stored because there was no room.
        failed: values whose bytes could not be moved, or whose reservation was lost.
        written_bytes: bytes of the values stored.
        differed_memory: values read that were not what had been put, in the same way twice: they lie so in
            their segment, and the master has been told.
        differed_wire: values and pieces that were not what had been sent when they arrived.
        calls: how long calls took: ``get`` and ``put`` from their first question to the master to the end of
            the last answer, and each question to the master by its name (``master.Locate``).
    """

    hits: int
    misses: int
    read_bytes: int
    stored: int
    kept: int
    refused: int
    failed: int
    written_bytes: int
    differed_memory: int
    differed_wire: int
    calls: dict[str, Latency]


class ClientCounters:
    """Counts for one client. Thread-safe."""

    def __init__(self) -> None:
        # A buffer of a value may be collected anywhere, in here, too, and then counts its read.
        self._lock = threading.RLock()
        self._latencies = Latencies()
        # What somebody else counts: as Quick.take_counts.
        self.more: Callable[[], Counts] | None = None
        self._hits = self._misses = self._read_bytes = 0
        self._differed_memory = self._differed_wire = 0
        self._stored = self._kept = self._refused = self._failed = self._written_bytes = 0

    def observe(self, call: str, seconds: float, *, failed: bool = False) -> None:
        """A call has ended."""
        with self._lock:
            self._latencies.observe(call, seconds, failed=failed)

    def read(self, seconds: float, hits: int, misses: int, nbytes: int, *, failed: bool = False) -> None:
        """A batch was read, in so many seconds."""
        with self._lock:
            self._latencies.observe("get", seconds, failed=failed)
            self._hits += hits
            self._misses += misses
            self._read_bytes += nbytes

    def differed(self, *, memory: int = 0, wire: int = 0) -> None:
        """Bytes that were compared are not what they should be; see ClientNumbers."""
        if memory or wire:
            with self._lock:
                self._differed_memory += memory
                self._differed_wire += wire

    def wrote(self, *, stored: int, kept: int, refused: int, failed: int, nbytes: int) -> None:
        """A batch was put."""
        with self._lock:
            self._stored += stored
            self._kept += kept
            self._refused += refused
            self._failed += failed
            self._written_bytes += nbytes

    def numbers(self) -> ClientNumbers:
        """Everything counted so far."""
        with self._lock:
            self._take_more()
            return ClientNumbers(
                hits=self._hits,
                misses=self._misses,
                read_bytes=self._read_bytes,
                stored=self._stored,
                kept=self._kept,
                refused=self._refused,
                failed=self._failed,
                written_bytes=self._written_bytes,
                differed_memory=self._differed_memory,
                differed_wire=self._differed_wire,
                calls=self._latencies.snapshot(),
            )

    def _take_more(self) -> None:
        if self.more is None:
            return
        calls, (hits, misses, read_bytes, stored, written_bytes) = self.more()
        for name, count, failures, total_s, buckets in calls:
            self._latencies.add(name, Latency(count, failures, total_s, buckets))
        self._hits += hits
        self._misses += misses
        self._read_bytes += read_bytes
        self._stored += stored
        self._written_bytes += written_bytes
