"""A conductor in a thread of the test, on a real socket."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from mooncake_conductor.config import ConductorConfig
from mooncake_conductor.server import ConductorServer

__all__ = ["RunningConductor"]

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


class RunningConductor:
    """Runs while the ``with`` block does.

    Attributes:
        url: base URL of the gateway.
    """

    def __init__(self, config: ConductorConfig) -> None:
        self._server = ConductorServer(config)
        self.url = self._server.url
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="conductor", daemon=True)

    def __enter__(self) -> RunningConductor:
        self._thread.start()
        ready = self._ready.wait(START_TIMEOUT_S)
        if self._failure is not None:
            self._thread.join(STOP_TIMEOUT_S)
            raise self._failure
        if not ready:
            raise TimeoutError(f"the conductor did not start within {START_TIMEOUT_S:g} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the conductor did not stop within {STOP_TIMEOUT_S:g} s")
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(self._ready.set, signals=False))
        except BaseException as failure:  # noqa: BLE001 - carried over to the test's thread, which raises it
            self._failure = failure
        finally:
            self._ready.set()
