"""How long things took, in buckets that double."""

from __future__ import annotations

import msgspec

__all__ = ["BUCKETS", "Latencies", "Latency", "cumulative", "quantile_s"]

# Bucket i counts what took less than 2**i microseconds; the last one everything above 16.8 s.
BUCKETS = 26


class Latency(msgspec.Struct, array_like=True):
    """What one kind of call took.

    Attributes:
        count: calls, those included that failed.
        failures: calls that raised.
        total_s: seconds of all of them together.
        buckets: calls by time: number i counts those below 2**i microseconds and not below 2**(i-1), the last
            all longer ones.
    """

    count: int = 0
    failures: int = 0
    total_s: float = 0.0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * BUCKETS)


class Latencies:
    """Latencies by the name of the call. Not thread-safe."""

    def __init__(self) -> None:
        self._by_name: dict[str, Latency] = {}

    def observe(self, name: str, seconds: float, *, failed: bool = False) -> None:
        """Count a call."""
        latency = self._by_name.get(name)
        if latency is None:
            latency = self._by_name[name] = Latency()
        latency.count += 1
        latency.failures += failed
        latency.total_s += seconds
        latency.buckets[min(int(seconds * 1e6).bit_length(), BUCKETS - 1)] += 1

    def add(self, name: str, more: Latency) -> None:
        """Count calls that somebody else has counted."""
        latency = self._by_name.setdefault(name, Latency())
        latency.count += more.count
        latency.failures += more.failures
        latency.total_s += more.total_s
        latency.buckets = [ours + theirs for ours, theirs in zip(latency.buckets, more.buckets, strict=True)]

    def snapshot(self) -> dict[str, Latency]:
        """A copy of everything counted so far."""
        return {
            name: Latency(one.count, one.failures, one.total_s, list(one.buckets))
            for name, one in self._by_name.items()
        }


def cumulative(latency: Latency) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: upper bound in seconds, calls up to it."""
    seen, found = 0, list[tuple[str, float]]()
    for index, count in enumerate(latency.buckets[:-1]):
        seen += count
        found.append((repr(2**index / 1e6), float(seen)))
    return [*found, ("+Inf", float(latency.count))]


def quantile_s(latency: Latency, share: float) -> float | None:
    """An upper bound of what ``share`` of the calls took; None when there were none, infinite beyond 16 s."""
    if not latency.count:
        return None
    seen = 0
    for index, count in enumerate(latency.buckets[:-1]):
        seen += count
        if seen >= share * latency.count:
            return float(2**index / 1e6)
    return float("inf")
