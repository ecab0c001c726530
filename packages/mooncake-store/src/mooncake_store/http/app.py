"""The ASGI application: routes, pages and files of the HTTP interface."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]

from mooncake_store.aio import AsyncStore
from mooncake_store.http import copies, numbers, objects
from mooncake_store.http.openapi import document
from mooncake_store.http.service import Handler, HttpLimits, HttpService

__all__ = ["build_app"]

WEB = Path(__file__).with_name("web")
# Nothing of anywhere else is loaded or asked, whatever a page is told. Swagger UI sets styles of elements.
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
DOCS = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Mooncake store API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/files/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="docs/files/swagger-ui-bundle.js"></script><script src="web/docs.js"></script></body></html>
"""

log = logging.getLogger(__name__)


def build_app(store: AsyncStore, *, token: str = "", limits: HttpLimits | None = None) -> Starlette:
    """The interface to a store. With ``token``, all but /health and the pages without numbers asks for it."""
    service = HttpService(store, token, limits or HttpLimits())
    described = msgspec.json.encode(
        document(importlib.metadata.version("mooncake-store"), secret=bool(token))
    )

    async def openapi(request: Request) -> Response:
        return Response(described, media_type="application/json")

    def route(path: str, method: str, handler: Handler, *, secret: bool = True) -> Route:
        made = Route(path, service.endpoint(handler, secret=secret), methods=[method])
        # Starlette answers HEAD with GET's handler, which would read the value.
        made.methods = {method}
        return made

    routes: list[BaseRoute] = [
        route("/v1/objects/{key:path}", "PUT", objects.put_object),
        route("/v1/objects/{key:path}", "GET", objects.get_object),
        route("/v1/objects/{key:path}", "HEAD", objects.head_object),
        route("/v1/objects/{key:path}", "DELETE", objects.delete_object),
        route("/v1/objects", "GET", objects.list_objects),
        route("/v1/objects", "DELETE", objects.delete_objects),
        route("/v1/pins/{key:path}", "PUT", objects.put_pin),
        route("/v1/pins/{key:path}", "DELETE", objects.delete_pin),
        route("/v1/end-session", "POST", objects.end_session),
        route("/v1/exist", "POST", objects.exist_objects),
        route("/v1/remove", "POST", objects.remove_objects),
        route("/v1/copy", "POST", copies.copy_object),
        route("/v1/move", "POST", copies.move_object),
        route("/v1/replicate", "POST", copies.replicate_objects),
        route("/v1/replicas", "POST", copies.find_replicas),
        route("/v1/drain", "POST", copies.drain_segment),
        route("/v1/stats", "GET", numbers.get_stats),
        route("/v1/segments", "GET", numbers.get_segments),
        route("/v1/report", "GET", numbers.get_report),
        route("/metrics", "GET", numbers.get_metrics),
        route("/health", "GET", numbers.get_health, secret=False),
        Route("/", _page),
        Route("/docs", _docs),
        Route("/openapi.json", openapi),
        Mount("/docs/files", StaticFiles(directory=swagger_ui_path)),
        Mount("/web", StaticFiles(directory=WEB)),
    ]
    return Starlette(routes=routes)


async def _page(request: Request) -> Response:
    return _html((WEB / "index.html").read_text(encoding="utf-8"))


async def _docs(request: Request) -> Response:
    return _html(DOCS)


def _html(text: str) -> Response:
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})
