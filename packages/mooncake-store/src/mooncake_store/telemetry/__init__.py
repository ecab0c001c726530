"""What a client and a master count of themselves; :mod:`mooncake_store.metrics` gives it to Prometheus."""

from mooncake_store.telemetry.client import ClientCounters, ClientNumbers
from mooncake_store.telemetry.hot import HotDigests
from mooncake_store.telemetry.latency import Latencies, Latency, cumulative, quantile_s

__all__ = [
    "ClientCounters",
    "ClientNumbers",
    "HotDigests",
    "Latencies",
    "Latency",
    "cumulative",
    "quantile_s",
]
