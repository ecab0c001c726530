"""The metadata server: a registry over HTTP that keeps its entries in memory.

Losing them is no harm, since engines announce themselves again within a third of an entry's lifetime.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mooncake_transfer._address import join_address
from mooncake_transfer._errors import ConfigError
from mooncake_transfer.listening import listen
from mooncake_transfer.registry.table import ExpiringTable
from mooncake_transfer.registry.wire import Lost, Removal, Renewal, etag

__all__ = ["MetadataServer", "ServerTls", "build_app"]

MAX_VALUE_BYTES = 1 << 20
MAX_BATCH_BYTES = 8 << 20
MAX_KEY_BYTES = 4096
MAX_TTL_S = 86400.0
MAX_ENTRIES = 1_000_000
KEEP_ALIVE_S = 75
GRACE_S = 2
JSON = "application/json"

Decoded = TypeVar("Decoded", Renewal, Removal)
Handler = Callable[["_Service", Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of the server's certificate and key; with ``client_ca``, clients must have one of that CA."""

    cert: str
    key: str
    client_ca: str = ""


@dataclass(slots=True)
class _Service:
    """What the handlers share."""

    token: str
    table: ExpiringTable = field(default_factory=ExpiringTable)
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    requests: Counter = field(init=False)

    def __post_init__(self) -> None:
        entries = Gauge("mooncake_metadata_entries", "Entries that have not expired", registry=self.metrics)
        entries.set_function(lambda: len(self.table))
        self.requests = Counter(
            "mooncake_metadata_requests", "Requests by what they ask", ["what"], registry=self.metrics
        )

    def route(self, path: str, method: str, handler: Handler, *, secret: bool = True) -> Route:
        """Serve ``path`` to those who have the token, or to everybody."""

        async def endpoint(request: Request) -> Response:
            if secret and not self._may(request):
                raise HTTPException(401, "a token is needed: Authorization: Bearer TOKEN")
            self.requests.labels(handler.__name__.strip("_")).inc()
            return await handler(self, request)

        return Route(path, endpoint, methods=[method])

    def _may(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return not self.token or hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())


async def _health(service: _Service, request: Request) -> Response:
    return PlainTextResponse("ok")


async def _metrics(service: _Service, request: Request) -> Response:
    return Response(generate_latest(service.metrics), media_type=CONTENT_TYPE_LATEST)


async def _get(service: _Service, request: Request) -> Response:
    value = service.table.get(_key(request))
    if value is None:
        raise HTTPException(404, "no such entry")
    return Response(value, media_type=JSON, headers={"ETag": f'"{etag(value)}"'})


async def _put(service: _Service, request: Request) -> Response:
    key, ttl_s = _key(request), _ttl_s(request.query_params.get("ttl_s", ""))
    match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
    if none_match == "*":
        wanted = None
    elif match is not None:
        wanted = match.strip('"')
    else:
        raise HTTPException(428, 'send If-None-Match: * for a new entry, or If-Match: "its ETag"')
    value = await _body(request, MAX_VALUE_BYTES)
    if len(service.table) >= MAX_ENTRIES and service.table.get(key) is None:
        raise HTTPException(507, f"there are {MAX_ENTRIES} entries already")
    fits = _is_absent if wanted is None else _has_tag(wanted)
    done = service.table.replace(key, fits, value, ttl_s)
    return Response(status_code=204 if done else 412)


async def _list(service: _Service, request: Request) -> Response:
    found = service.table.list(request.query_params.get("prefix", ""))
    return Response(msgspec.json.encode(found), media_type=JSON)


async def _renew(service: _Service, request: Request) -> Response:
    renewal = await _decoded(request, Renewal)
    lost = service.table.renew(_fits(renewal.entries), _ttl_s(renewal.ttl_s))
    return Response(msgspec.json.encode(Lost(lost)), media_type=JSON)


async def _remove(service: _Service, request: Request) -> Response:
    service.table.remove(_fits((await _decoded(request, Removal)).entries))
    return Response(status_code=204)


def _fits(tags: dict[str, str]) -> dict[str, Callable[[bytes | None], bool]]:
    return {key: _has_tag(tag) for key, tag in tags.items()}


def _has_tag(tag: str) -> Callable[[bytes | None], bool]:
    return lambda value: value is not None and etag(value) == tag


def _is_absent(value: bytes | None) -> bool:
    return value is None


def _key(request: Request) -> str:
    key = request.query_params.get("key", "")
    if not 1 <= len(key.encode(errors="replace")) <= MAX_KEY_BYTES:
        raise HTTPException(400, f"?key= needs 1 to {MAX_KEY_BYTES} bytes")
    return key


def _ttl_s(text: str | float) -> float:
    try:
        ttl_s = float(text)
    except ValueError:
        ttl_s = 0.0
    if not 0 < ttl_s <= MAX_TTL_S:
        raise HTTPException(400, f"ttl_s is {text!r}; it must be over 0 and at most {MAX_TTL_S:g} seconds")
    return ttl_s


async def _decoded(request: Request, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(await _body(request, MAX_BATCH_BYTES), type=kind)
    except msgspec.MsgspecError as error:
        raise HTTPException(400, str(error)) from None


async def _body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"at most {limit} bytes are taken")
    return bytes(body)


def build_app(token: str = "") -> Starlette:
    """The server as an ASGI application with an empty table; with ``token``, all but /health asks for it."""
    service = _Service(token)
    return Starlette(
        routes=[
            service.route("/health", "GET", _health, secret=False),
            service.route("/metrics", "GET", _metrics),
            service.route("/v1/entry", "GET", _get),
            service.route("/v1/entry", "PUT", _put),
            service.route("/v1/entries", "GET", _list),
            service.route("/v1/entries/renew", "POST", _renew),
            service.route("/v1/entries/remove", "POST", _remove),
        ]
    )


class _Server(uvicorn.Server):
    """Says when it takes requests, and leaves signals to its owner."""

    on_ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MetadataServer:
    """One server. The socket is bound on creation, so ``url`` is known before it runs.

    Raises ConfigError when the address cannot be had or the certificates cannot be used.
    """

    def __init__(self, host: str, port: int, *, token: str = "", tls: ServerTls | None = None) -> None:
        config = uvicorn.Config(
            build_app(token),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=tls.cert if tls else None,
            ssl_keyfile=tls.key if tls else None,
            ssl_ca_certs=tls.client_ca or None if tls else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one too
            raise ConfigError(f"the certificates {tls} cannot be used: {error}") from error
        self._socket = _listen(host, port)
        self.url = f"{'https' if tls else 'http'}://{join_address(host, self._socket.getsockname()[1])}"
        self._server = _Server(config)

    async def serve(self, on_ready: Callable[[], None], *, signals: bool = True) -> None:
        """Serve until SIGTERM, SIGINT (with ``signals``) or ``stop``; ``on_ready`` is called first."""
        self._server.on_ready = on_ready
        loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End ``serve``. May be called from a signal handler or another thread."""
        self._server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"the metadata server cannot listen on {join_address(host, port)}: {error.strerror or error}; "
            "choose another --port, or 0 for any free one"
        ) from error
