"""Prometheus metrics of an engine; needs prometheus-client (``pip install mooncake-transfer[metrics]``).

Either let the engine serve them (``TransferConfig.metrics_port``), or register a collector with a registry of
your own::

    from prometheus_client import REGISTRY
    from mooncake_transfer.metrics import EngineCollector

    REGISTRY.register(EngineCollector(engine))
"""

from __future__ import annotations

import logging
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mooncake_transfer._address import join_address
from mooncake_transfer._errors import ConfigError, TransferError
from mooncake_transfer._scarce import start_thread
from mooncake_transfer.introspection import Snapshot, take_snapshot
from mooncake_transfer.listening import bindable
from mooncake_transfer.rails import RailStatus

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine

__all__ = ["EngineCollector", "MetricsServer"]

PREFIX = "mooncake_transfer"
RAIL = ("engine", "peer", "driver", "device", "remote_device")
RAIL_STATES = ("closed", "suspect", "open", "half-open")
RAIL_COUNTERS = (
    ("bytes", "bytes", "Bytes moved"),
    ("operations", "ops", "Slices that succeeded"),
    ("errors", "errors", "Slices that failed"),
    ("retries", "retries", "Slices that failed here and were tried again, here or elsewhere"),
)
DRIVER_COUNTERS = (
    ("bytes_read", "Bytes read from peers"),
    ("bytes_written", "Bytes written to peers"),
    ("ops", "Operations completed for this engine"),
    ("errors", "Operations that failed"),
    ("refused", "Requests of peers that were refused"),
    ("faults", "How often the driver did what its contract forbids"),
    ("notices_sent", "Notifications that went behind the bytes of a write"),
    ("notices_received", "Notifications of peers that came so"),
    ("notices_dropped", "Notices that came twice, or of nobody known here"),
)
JOIN_S = 5.0

log = logging.getLogger(__name__)


class EngineCollector(Collector):
    """Turns an engine's counters into metrics whenever they are asked for; costs nothing in between.

    It does not keep the engine alive; a closed engine has no metrics.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = weakref.ref(engine)

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance: several engines of a process offer the same metrics, by label."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics. Their names start with ``mooncake_transfer_``."""
        engine = self._engine()
        if engine is None:
            return
        try:
            snapshot = take_snapshot(engine)
        except TransferError:  # closed between two looks of Prometheus
            return
        yield from _engine_metrics(snapshot)
        yield from _driver_metrics(snapshot)
        yield from _rail_metrics(snapshot)


def _engine_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    info = InfoMetricFamily(f"{PREFIX}_engine", "Which incarnation this is", labels=["engine"])
    info.add_metric([snapshot.address], {"epoch": str(snapshot.epoch), "pid": str(snapshot.pid)})
    yield info
    for name, value, text in (
        ("regions", snapshot.regions, "Registered regions"),
        ("region_bytes", snapshot.region_bytes, "Bytes in registered regions"),
    ):
        gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["engine"])
        gauge.add_metric([snapshot.address], value)
        yield gauge


def _driver_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    labels = ["engine", "driver", "device"]
    # A driver with several endpoints counts for each: "tcp 10.0.0.1", by the device after the driver's name.
    endpoints = [(name.partition(" "), counters) for name, counters in snapshot.drivers.items()]
    for name, text in DRIVER_COUNTERS:
        counter = CounterMetricFamily(f"{PREFIX}_driver_{name}", text, labels=labels)
        for (driver, _, device), counters in endpoints:
            counter.add_metric([snapshot.address, driver, device], counters[name])
        yield counter
    gauge = GaugeMetricFamily(
        f"{PREFIX}_driver_connections", "Connections made by this engine", labels=labels
    )
    for (driver, _, device), counters in endpoints:
        gauge.add_metric([snapshot.address, driver, device], counters["connections"])
    yield gauge


def _rail_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    rails = [(_labels(snapshot, rail), rail) for rail in snapshot.rails]
    for name, attribute, text in RAIL_COUNTERS:
        counter = CounterMetricFamily(f"{PREFIX}_rail_{name}", text, labels=RAIL)
        for labels, rail in rails:
            counter.add_metric(labels, getattr(rail, attribute))
        yield counter
    for name, attribute, text in (
        ("in_flight_bytes", "in_flight_bytes", "Bytes that are with the driver now"),
        ("bandwidth_bytes_per_second", "bandwidth_bytes_per_s", "Moving average that slices are placed by"),
    ):
        gauge = GaugeMetricFamily(f"{PREFIX}_rail_{name}", text, labels=RAIL)
        for labels, rail in rails:
            gauge.add_metric(labels, getattr(rail, attribute))
        yield gauge
    state = GaugeMetricFamily(
        f"{PREFIX}_rail_state", "1 for the state that the breaker is in", labels=[*RAIL, "state"]
    )
    latency = HistogramMetricFamily(
        f"{PREFIX}_rail_latency_seconds", "From submitting a slice to its end", labels=RAIL
    )
    for labels, rail in rails:
        for name in RAIL_STATES:
            state.add_metric([*labels, name], float(rail.state == name))
        # The core counts slices per bucket and no total time, so there is no sum.
        latency.add_metric(labels, _cumulative(rail.latency_buckets), sum_value=None)
    yield state
    yield latency


def _labels(snapshot: Snapshot, rail: RailStatus) -> list[str]:
    return [snapshot.address, rail.peer, rail.driver, rail.device, rail.remote_device]


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    seen, found = 0, list[tuple[str, float]]()
    for index, count in enumerate(buckets[:-1]):
        seen += count
        found.append((repr(2**index / 1e6), seen))
    return [*found, ("+Inf", seen + buckets[-1])]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of each question."""


class MetricsServer:
    """Serves ``/metrics`` of collectors, such as EngineCollector, over HTTP, on a thread of its own.

    Attributes:
        address: ``host:port`` it listens on.
    """

    def __init__(self, collectors: Iterable[Collector], host: str, port: int) -> None:
        """Listen on ``host`` and ``port`` (0: any free one).

        Raises ConfigError when that cannot be had, TransferError when no thread is left.
        """
        registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        try:
            # Not start_http_server() of the library, which loses the interface of a link-local address.
            family, where = bindable(host, port)
            server = _IPv6Server if family == socket.AF_INET6 else _Server
            self._server = server(where, _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {join_address(host, port)}: {error}; choose a free port"
            ) from None
        self._server.set_app(make_wsgi_app(registry))
        self.address = join_address(host, self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="mooncake-metrics", daemon=True
        )
        try:
            start_thread(self._thread)
        except BaseException:
            self._server.server_close()
            raise
        log.info("metrics at http://%s/metrics", self.address)

    def close(self) -> None:
        """Stop listening, and end the thread. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(JOIN_S)
