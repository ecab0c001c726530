"""Relays a decode worker's stream to the client: adds the placement, and ends a broken stream with an error
event."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec

from mooncake_conductor._errors import WorkerError, WorkerTimeout, WorkerUnreachable
from mooncake_conductor.metrics import Metrics
from mooncake_conductor.policy.snapshot import Placement
from mooncake_conductor.sse import DONE, as_event, is_preamble, json_event, read_event
from mooncake_conductor.upstream import EventStream, deadline, raise_for_error

__all__ = ["TokenStream", "with_placement"]

# After [DONE] only the end of the HTTP body is to come; reading it gives the connection back to the pool.
END_OF_BODY_S = 1.0


def with_placement(answer: dict[str, Any], placement: Placement) -> dict[str, Any]:
    """The answer, or the last chunk of one, with the placement in its ``mooncake`` object."""
    told = answer.get("mooncake")
    answer["mooncake"] = {
        **(told if isinstance(told, dict) else {}),
        "placement": msgspec.to_builtins(placement),
    }
    return answer


class TokenStream:
    """An answer that is being decoded. ``open`` it, then read ``chunks`` once."""

    def __init__(
        self, events: EventStream, placement: Placement, idle_timeout_s: float, metrics: Metrics
    ) -> None:
        self._events = events
        self._placement = placement
        self._idle_timeout_s = idle_timeout_s
        self._metrics = metrics
        self._held: list[bytes] = []

    async def open(self, timeout_s: float) -> None:
        """Wait for the first token. What opens the answer before it is held back, so that until then the
        request can still be served by another worker, or be answered with an HTTP error.

        Raises WorkerUnreachable, WorkerTimeout, and what the worker says: KvTransferFailed, WorkerRefused.
        """
        worker = self._events.worker
        with deadline(worker, timeout_s, "the first token"):
            while (data := await self._events.next(timeout_s)) is not None:
                chunk = read_event(data)
                raise_for_error(worker, chunk)
                self._held.append(data)
                if not is_preamble(chunk):
                    return
        raise WorkerUnreachable(worker, "ended its answer before the first token")

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The events to send, ``[DONE]`` last. A worker that dies or falls silent ends it with an error
        event."""
        try:
            for data in self._held:
                yield self._relayed(data)
            finished = self._held[-1] == DONE
            while not finished and (event := await self._events.next(self._idle_timeout_s)) is not None:
                yield self._relayed(event)
                finished = event == DONE
            if finished:
                await self._read_to_the_end()
                return
            error: WorkerError = WorkerUnreachable(self._events.worker, "ended its answer without [DONE]")
        except (WorkerUnreachable, WorkerTimeout) as broken:
            error = broken
        code = "decode_worker_silent" if isinstance(error, WorkerTimeout) else "decode_worker_lost"
        self._metrics.broken_streams.labels(code).inc()
        message = f"The answer ends early: {error}. Send the request again."
        yield json_event({"error": {"message": message, "type": "server_error", "param": None, "code": code}})
        yield as_event(DONE)

    def _relayed(self, data: bytes) -> bytes:
        if b'"mooncake"' in data or b'"usage"' in data:
            chunk = read_event(data)
            # Chunks in mid-answer may say "usage": null.
            if chunk.get("mooncake") or chunk.get("usage"):
                return json_event(with_placement(chunk, self._placement))
        return as_event(data)

    async def _read_to_the_end(self) -> None:
        with suppress(WorkerError):
            while await self._events.next(END_OF_BODY_S) is not None:
                pass
