"""Numbers of the store over HTTP: as JSON for people and pages, as text for Prometheus."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from mooncake_store.http.service import HttpService
from mooncake_store.metrics import ReportCollector, StoreCollector
from mooncake_store.telemetry.shown import as_json
from mooncake_transfer.metrics import EngineCollector

__all__ = ["get_health", "get_metrics", "get_report", "get_segments", "get_stats"]

JSON = "application/json"
HOT = 20


async def get_health(service: HttpService, request: Request) -> Response:
    """Whether the store answers."""
    await service.store.stats()
    return _json({"status": "ok"})


async def get_stats(service: HttpService, request: Request) -> Response:
    """The numbers of the whole store."""
    return _json(msgspec.structs.asdict(await service.store.stats()))


async def get_report(service: HttpService, request: Request) -> Response:
    """Everything that the page shows."""
    return _json(as_json(await service.store.report(HOT)))


async def get_segments(service: HttpService, request: Request) -> Response:
    """The segments."""
    return _json({"segments": as_json(await service.store.report(0))["segments"]})


async def get_metrics(service: HttpService, request: Request) -> Response:
    """The metrics of the master, of this client of it, and of the engine below."""
    store = service.store.store
    registry = CollectorRegistry()
    for collector in (ReportCollector(store), StoreCollector(store), EngineCollector(store.engine)):
        registry.register(collector)

    def text() -> bytes:
        return generate_latest(registry)

    return Response(await service.store.run(text), media_type=CONTENT_TYPE_LATEST)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)
