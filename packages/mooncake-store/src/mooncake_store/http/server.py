"""Runs the HTTP interface beside a master or a client, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from types import TracebackType

import msgspec
import uvicorn

from mooncake_store._errors import ConfigError
from mooncake_store.aio import AsyncStore
from mooncake_store.client import Store
from mooncake_store.http.app import build_app
from mooncake_store.http.service import HttpLimits
from mooncake_transfer import listening

__all__ = ["HttpServer", "HttpTls"]

START_TIMEOUT_S = 10.0
GRACE_S = 2
KEEP_ALIVE_S = 75
THREADS = 16

log = logging.getLogger(__name__)


class HttpTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of the server's certificate and key; with ``client_ca``, clients need one of that CA."""

    certificate_file: str
    key_file: str
    client_ca_file: str = ""


class _Server(uvicorn.Server):
    """Leaves signals to the process, which ends it by ``should_exit``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One server on one store, which outlives it. A context manager.

    Attributes:
        url: where it serves.
    """

    def __init__(
        self,
        store: Store,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str = "",
        limits: HttpLimits | None = None,
        tls: HttpTls | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Serve from now on; port 0 takes any free one; with a ``listener`` on that socket instead.

        Raises ConfigError when the address cannot be had or the certificates do not do.
        """
        self._store = AsyncStore(store, threads=THREADS)
        config = uvicorn.Config(
            build_app(self._store, token=token, limits=limits),
            log_config=None,
            access_log=False,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=tls.certificate_file if tls else None,
            ssl_keyfile=tls.key_file if tls else None,
            ssl_ca_certs=(tls.client_ca_file or None) if tls else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca_file else ssl.CERT_NONE,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one too
            raise ConfigError(f"the certificates {tls} cannot be used: {error}") from error
        self._socket = listener or listen(host, port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"{'https' if tls else 'http'}://{listening.join_address(host, port)}"
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="mooncake-store-http", daemon=True)
        self._thread.start()
        log.info("http at %s", self.url)

    def close(self) -> None:
        """Stop listening, give requests a moment to end, and end the thread. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join()
        self._store.stop_threads()
        self._socket.close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except Exception:
            # The end of a thread: nobody above could report it.
            log.exception("the http server at %s stopped", self.url)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    try:
        return listening.listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot serve HTTP on {listening.join_address(host, port)}: {error.strerror or error}; "
            "choose another port, or 0 for any free one"
        ) from error
