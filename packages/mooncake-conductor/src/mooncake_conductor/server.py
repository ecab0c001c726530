"""Runs a conductor as an HTTP server until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from mooncake_conductor._errors import ListenFailed
from mooncake_conductor.conductor import Conductor
from mooncake_conductor.config import ConductorConfig
from mooncake_conductor.gateway import build_app
from mooncake_transfer import listening

__all__ = ["ConductorServer", "listen"]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ListenFailed when the port is taken or the address is not of this
    machine."""
    try:
        # The whole backlog at once: uvicorn sets its own only when it starts to serve.
        return listening.listen(host, port)
    except OSError as error:
        raise ListenFailed(
            f"the conductor cannot listen on {listening.join_address(host, port)}: "
            f"{error.strerror or error}; choose another --port, or 0 for any free one"
        ) from error


class _Server(uvicorn.Server):
    """Says when it takes requests, and ends those that outlast the grace period in a form that clients read.

    Leaves signals alone: uvicorn would raise them again after its shutdown, and the process would not exit
    cleanly.
    """

    def __init__(self, config: uvicorn.Config, conductor: Conductor, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._conductor = conductor
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace_s = self._conductor.config.shutdown_timeout_s
        ending = asyncio.get_running_loop().call_later(grace_s, self._conductor.ending.set)
        await super().shutdown(sockets)
        ending.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ConductorServer:
    """One server. The socket is bound on creation, so ``url`` is known before it runs.

    Raises ListenFailed when the address cannot be had.
    """

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._socket = listen(config.host, config.port)
        self.url = f"http://{listening.join_address(config.host, self._socket.getsockname()[1])}"
        self._server: uvicorn.Server | None = None
        self._stopping = False

    async def serve(self, on_ready: Callable[[], None] = lambda: None, *, signals: bool = True) -> None:
        """Serve until SIGTERM, SIGINT (with ``signals``) or ``stop``; ``on_ready`` is called first.

        Running requests may go on for ``shutdown_timeout_s``, then they end in an error. Raises ConfigError
        before it serves when the policy does not exist.
        """
        try:
            conductor = Conductor(self._config)
            try:
                await conductor.start()
                await self._serve(conductor, on_ready, signals)
            finally:
                await conductor.close()
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End ``serve``. May be called from a signal handler or another thread."""
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True

    async def _serve(self, conductor: Conductor, on_ready: Callable[[], None], signals: bool) -> None:
        server = _Server(
            uvicorn.Config(
                build_app(conductor),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                # A last resort: by then the conductor has ended every request itself.
                timeout_graceful_shutdown=math.ceil(self._config.shutdown_timeout_s) + 1,
            ),
            conductor,
            on_ready,
        )
        self._server = server
        server.should_exit = self._stopping
        loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        await server.serve(sockets=[self._socket])
