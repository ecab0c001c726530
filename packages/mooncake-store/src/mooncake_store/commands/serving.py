"""``mooncake store rest``, and the HTTP interface of ``mooncake store master``."""

from __future__ import annotations

import importlib
import logging
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store._errors import ConfigError, MasterError
from mooncake_store.client import Store
from mooncake_store.commands.session import MasterAddress, Tenant, TokenFile, checked, client_of
from mooncake_store.config import StoreConfig, read_token
from mooncake_transfer import TransferEngine
from mooncake_transfer.listening import join_address
from mooncake_transfer.process import announce_ready, configure_logging, watch_lifeline

if TYPE_CHECKING:
    from mooncake_store.http.server import HttpServer

__all__ = ["HttpFront", "rest"]

RETRY_S = 0.5
LOOPBACK = ("127.", "::1", "localhost")

log = logging.getLogger("mooncake_store.http")


@checked
def rest(
    master: MasterAddress = "",
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0 takes any free one.")] = 8380,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that clients need.")] = None,
    tls_cert: Annotated[str, typer.Option(help="PEM file of the server's certificate: serves https.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file of the certificate's key.")] = "",
    tls_client_ca: Annotated[
        str, typer.Option(help="PEM file of the CA that clients need a certificate of.")
    ] = "",
    max_object_bytes: Annotated[int, typer.Option(help="Largest value that is taken.")] = 1 << 30,
    tenant: Tenant = "",
    store_token_file: TokenFile = "",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ready_fd: Annotated[int | None, typer.Option(help='Write {"url": ...} here when ready.')] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="End at once when this pipe is closed.")] = None,
) -> None:
    """Serve a store over HTTP until SIGTERM or SIGINT: objects, numbers, metrics, a page."""
    configure_logging(log_level)
    watch_lifeline(lifeline_fd)
    server_module = _import("mooncake_store.http.server")
    service_module = _import("mooncake_store.http.service")
    if bool(tls_cert) != bool(tls_key) or (tls_client_ca and not tls_cert):
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    tls = None
    if tls_cert:
        tls = server_module.HttpTls(certificate_file=tls_cert, key_file=tls_key, client_ca_file=tls_client_ca)
    token = read_token(token_file)
    limits = service_module.HttpLimits(max_object_bytes=max_object_bytes)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with (
        client_of(master, tenant, store_token_file) as store,
        server_module.HttpServer(store, host, port, token=token, limits=limits, tls=tls) as server,
    ):
        if not (token or tls_client_ca or host.startswith(LOOPBACK)):
            log.warning("anybody who reaches %s may read and change the store; see --token-file", server.url)
        announce_ready(ready_fd, {"url": server.url})
        stop.wait()


class HttpFront:
    """The HTTP interface beside a master: serves as soon as there is a leader to ask. A context manager.

    Attributes:
        url: where it serves.
    """

    def __init__(
        self, engine: TransferEngine, master: str, config: StoreConfig, host: str, port: int, token: str
    ) -> None:
        """Take the address, and open a client in the background. Raises ConfigError."""
        module = _import("mooncake_store.http.server")
        self._socket: socket.socket = module.listen(host, port)
        self.url = f"http://{join_address(host, self._socket.getsockname()[1])}"
        if not (token or host.startswith(LOOPBACK)):
            log.warning(
                "anybody who reaches %s may read and change the store; see --http-token-file", self.url
            )
        self._engine, self._master, self._config, self._token = engine, master, config, token
        self._serve = module.HttpServer
        self._store: Store | None = None
        self._server: HttpServer | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-store-http-front", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._closing.set()
        self._thread.join()
        if self._server is not None:
            self._server.close()
        if self._store is not None:
            self._store.close()
        self._socket.close()

    def __enter__(self) -> HttpFront:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._store = Store(self._engine, self._master, config=self._config)
                self._server = self._serve(self._store, listener=self._socket, token=self._token)
            except MasterError as error:
                log.info("no master answers yet: %s", error)
                self._closing.wait(RETRY_S)
            else:
                return


def _import(name: str) -> Any:
    # Only now: the other commands need nothing of what a server imports.
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f'{error}; pip install "mooncake-store[rest]"') from error
