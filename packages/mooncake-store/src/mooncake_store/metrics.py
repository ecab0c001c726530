"""Prometheus metrics of a master and of a client; needs prometheus-client (``mooncake-store[metrics]``).

``mooncake store master --http-port`` serves those of the master. Those of a client go into a registry::

    from prometheus_client import REGISTRY
    from mooncake_store.metrics import StoreCollector

    REGISTRY.register(StoreCollector(store))
"""

from __future__ import annotations

import dataclasses
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mooncake_store._errors import StoreError
from mooncake_store.client import Store
from mooncake_store.master import Master
from mooncake_store.protocol import SegmentReport, StoreReport, StoreStats, TenantReport, TierReport
from mooncake_store.telemetry import ClientNumbers, Latency, cumulative
from mooncake_store.telemetry.attributes import attributes_of
from mooncake_store.telemetry.shown import fragmentation, useful
from mooncake_store.tiers.contract import Tier, TierCounters

__all__ = ["MasterCollector", "ReportCollector", "StoreCollector"]

Source = TypeVar("Source")

MASTER, CLIENT = "mooncake_store_master", "mooncake_store_client"
# Fields of StoreStats that only rise.
COUNTED = {"hits", "misses", "stored", "evicted", "removed", "lost", "corrupt"}
SEGMENT_GAUGES = (
    ("capacity_bytes", "Memory lent"),
    ("free_bytes", "Not taken by anything"),
    ("largest_hole_bytes", "Largest value that fits in one piece"),
)
TENANT_METRICS = (
    (GaugeMetricFamily, "used_bytes", "What a tenant's values take, with all replicas"),
    (GaugeMetricFamily, "quota_bytes", "Most that they may; absent without a bound"),
    (GaugeMetricFamily, "clients", "Clients that act for a tenant"),
    (CounterMetricFamily, "hits", "Keys found by a tenant's reads"),
    (CounterMetricFamily, "misses", "Keys not found by a tenant's reads"),
)
CLIENT_COUNTERS = (
    ("hits", "Keys whose values were read whole"),
    ("misses", "Keys asked for that were not there, or lost meanwhile"),
    ("read_bytes", "Bytes read from segments"),
    ("stored", "Values stored"),
    ("kept", "Values not stored because their key was taken"),
    ("refused", "Values not stored because there was no room"),
    ("failed", "Values whose bytes could not be moved"),
    ("written_bytes", "Bytes of the values stored"),
)


class _Collector(Collector, Generic[Source]):
    """Turns the numbers of its source into metrics whenever they are asked for; does not keep that alive."""

    def __init__(self, source: Source) -> None:
        self._source = weakref.ref(source)

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance, so that several may be registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics; none of what has gone."""
        source = self._source()
        if source is not None:
            yield from self._metrics_of(source)

    @abstractmethod
    def _metrics_of(self, source: Source) -> Iterator[Metric]: ...


class MasterCollector(_Collector[Master]):
    """The metrics of a master. Their names start with ``mooncake_store_master_``."""

    def _metrics_of(self, source: Master) -> Iterator[Metric]:
        yield from master_metrics(source.report(hot=0))


class StoreCollector(_Collector[Store]):
    """The metrics of one client. Their names start with ``mooncake_store_client_``."""

    def _metrics_of(self, source: Store) -> Iterator[Metric]:
        yield from client_metrics(source.numbers())
        yield from _opened_tier_metrics(source.tiers)


class ReportCollector(_Collector[Store]):
    """The metrics of a master elsewhere, as a client of it is told, and whether it answered."""

    def _metrics_of(self, source: Store) -> Iterator[Metric]:
        try:
            report = source.report(hot=0)
        except StoreError:
            report = None
        up = GaugeMetricFamily(f"{MASTER}_up", "1 when the master answered")
        up.add_metric([], float(report is not None))
        yield up
        if report is not None:
            yield from master_metrics(report)


def master_metrics(report: StoreReport) -> Iterator[Metric]:
    """The metrics of one report."""
    yield from _stats_metrics(report.stats)
    yield from _segment_metrics(report.segments)
    yield from _tenant_metrics(report.tenants)
    yield from _tier_metrics(report.tiers)
    yield _latency_metric(
        f"{MASTER}_request_seconds", "From taking a request up to its answer", "request", report.requests
    )
    yield _failure_metric(f"{MASTER}_request_failures", "Requests that failed", "request", report.requests)


def client_metrics(numbers: ClientNumbers) -> Iterator[Metric]:
    """The metrics of one client."""
    for name, text in CLIENT_COUNTERS:
        yield CounterMetricFamily(f"{CLIENT}_{name}", text, value=getattr(numbers, name))
    differed = CounterMetricFamily(
        f"{CLIENT}_corrupt",
        "Values that were not what had been put, by where that was done",
        labels=["place"],
    )
    for place in ("memory", "wire"):
        differed.add_metric([place], getattr(numbers, f"differed_{place}"))
    yield differed
    yield _latency_metric(
        f"{CLIENT}_call_seconds", "Puts, gets and questions to the master", "call", numbers.calls
    )
    yield _failure_metric(f"{CLIENT}_call_failures", "Calls that raised", "call", numbers.calls)


def _stats_metrics(stats: StoreStats) -> Iterator[Metric]:
    texts = attributes_of(StoreStats)
    for name in stats.__struct_fields__:
        kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
        yield kind(f"{MASTER}_{name}", texts[name], value=getattr(stats, name))


def _segment_metrics(segments: list[SegmentReport]) -> Iterator[Metric]:
    labels = ["segment", "owner"]
    names = [(f"{segment.segment:x}", segment.address) for segment in segments]
    for name, text in SEGMENT_GAUGES:
        gauge = GaugeMetricFamily(f"{MASTER}_segment_{name}", text, labels=labels)
        for label, segment in zip(names, segments, strict=True):
            gauge.add_metric(label, getattr(segment, name))
        yield gauge
    used = GaugeMetricFamily(
        f"{MASTER}_segment_used_bytes", "Taken, by what it is good for", labels=[*labels, "use"]
    )
    scattered = GaugeMetricFamily(
        f"{MASTER}_segment_fragmentation_ratio",
        "Share of the free bytes that are outside of the largest hole",
        labels=labels,
    )
    useful_share = GaugeMetricFamily(
        f"{MASTER}_segment_useful_ratio", "Share of the bytes taken that values have", labels=labels
    )
    draining = GaugeMetricFamily(
        f"{MASTER}_segment_draining", "1 while a segment is to become empty", labels=labels
    )
    for label, segment in zip(names, segments, strict=True):
        useful_share.add_metric(label, useful(segment))
        for use in ("evictable", "leased", "reserved", "pinned", "retiring"):
            used.add_metric([*label, use], getattr(segment, f"{use}_bytes"))
        scattered.add_metric(label, fragmentation(segment))
        draining.add_metric(label, segment.draining)
    yield from (used, scattered, useful_share, draining)


def _tier_metrics(tiers: list[TierReport]) -> Iterator[Metric]:
    records = GaugeMetricFamily(f"{MASTER}_tier_records", "Values in a tier", labels=["tier"])
    nbytes = GaugeMetricFamily(
        f"{MASTER}_tier_value_bytes", "What the values in a tier have", labels=["tier"]
    )
    owners = GaugeMetricFamily(f"{MASTER}_tier_owners", "Clients that have a tier open", labels=["tier"])
    for tier in tiers:
        records.add_metric([tier.tier], tier.records)
        nbytes.add_metric([tier.tier], tier.value_bytes)
        owners.add_metric([tier.tier], len(tier.owners))
    yield from (records, nbytes, owners)


def _opened_tier_metrics(tiers: list[Tier]) -> Iterator[Metric]:
    texts = attributes_of(TierCounters)
    for field in dataclasses.fields(TierCounters):
        text = texts.get(field.name, field.name.replace("_", " "))
        counter = CounterMetricFamily(f"{CLIENT}_tier_{field.name}", text, labels=["tier"])
        for tier in tiers:
            counter.add_metric([tier.id], getattr(tier.counters, field.name))
        yield counter
    for name, text in (("capacity_bytes", "Room of a tier; 0: not limited"), ("used_bytes", "Taken of it")):
        gauge = GaugeMetricFamily(f"{CLIENT}_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.id], getattr(tier.room(), name))
        yield gauge


def _tenant_metrics(tenants: list[TenantReport]) -> Iterator[Metric]:
    for kind, name, text in TENANT_METRICS:
        metric = kind(f"{MASTER}_tenant_{name}", text, labels=["tenant"])
        for tenant in tenants:
            value = getattr(tenant, name)
            if value is not None:
                metric.add_metric([tenant.tenant], value)
        yield metric


def _latency_metric(name: str, text: str, label: str, latencies: dict[str, Latency]) -> Metric:
    histogram = HistogramMetricFamily(name, text, labels=[label])
    for call, latency in sorted(latencies.items()):
        histogram.add_metric([call], cumulative(latency), sum_value=latency.total_s)
    return histogram


def _failure_metric(name: str, text: str, label: str, latencies: dict[str, Latency]) -> Metric:
    counter = CounterMetricFamily(name, text, labels=[label])
    for call, latency in sorted(latencies.items()):
        counter.add_metric([call], latency.failures)
    return counter
