"""Workers that serve from inside a test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.worker import Worker

__all__ = ["running_worker"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


@contextlib.contextmanager
def running_worker(config: WorkerConfig) -> Iterator[Worker]:
    """A worker that takes requests at ``worker.url`` until the block ends.

    Raises what ``Worker`` raises, and what ``Worker.serve`` raised, at the end of the block.
    """
    worker = Worker(config)
    ready = threading.Event()
    failure: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(worker.serve(ready.set, signals=False))
        except BaseException as error:
            failure.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=serve, name="worker-http")
    thread.start()
    try:
        assert ready.wait(START_TIMEOUT_S), "the worker does not take requests"
        assert not failure, f"the worker ended at once: {failure[0]}"
        yield worker
    finally:
        worker.stop()
        thread.join(STOP_TIMEOUT_S)
        assert not thread.is_alive(), "the worker does not stop"
    if failure:
        raise failure[0]
