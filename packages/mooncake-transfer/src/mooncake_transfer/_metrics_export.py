"""Starts and ends the metrics server of an engine; without one it needs no prometheus-client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from mooncake_transfer._errors import ConfigError

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine


class _Server(Protocol):
    address: str

    def close(self) -> None: ...


class MetricsExport:
    """The metrics server of one engine, if it has one. Holds no reference to the engine."""

    def __init__(self) -> None:
        self._server: _Server | None = None

    @property
    def address(self) -> str | None:
        """Where ``/metrics`` is served."""
        return None if self._server is None else self._server.address

    def start(self, engine: TransferEngine, host: str, port: int) -> None:
        """Serve metrics of ``engine``. Raises ConfigError when they cannot be served."""
        try:
            module = importlib.import_module("mooncake_transfer.metrics")
        except ImportError as error:
            raise ConfigError(
                f"metrics_port needs prometheus-client ({error}); pip install mooncake-transfer[metrics]"
            ) from None
        self._server = module.MetricsServer([module.EngineCollector(engine)], host, port)

    def stop(self) -> None:
        """End the server. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
