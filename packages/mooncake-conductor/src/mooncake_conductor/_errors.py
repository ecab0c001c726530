"""Exceptions of mooncake_conductor.

::

    ConductorError
    ├─ ConfigError
    ├─ ListenFailed
    ├─ TraceUnreadable
    ├─ WorkerError     ─ WorkerUnreachable · WorkerTimeout · WorkerRefused · KvTransferFailed
    └─ RequestRejected ─ InvalidRequest (BodyTooLarge) · ModelUnknown · NoWorker

Every message says what failed, on what, why, and what to do about it. A RequestRejected is what a client is
told: it carries the HTTP status and the fields of an OpenAI error object.
"""

from __future__ import annotations

import math


class ConductorError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(ConductorError, ValueError):
    """An option has a value that cannot work; nothing was started."""


class ListenFailed(ConductorError):
    """The address to serve on cannot be had: taken, or not of this machine."""


class TraceUnreadable(ConductorError, ValueError):
    """A file is no trace of the format that was asked for."""


class WorkerError(ConductorError):
    """A worker did not do its part of a request.

    Attributes:
        worker: URL of the worker.
    """

    def __init__(self, worker: str, message: str) -> None:
        self.worker = worker
        super().__init__(f"worker {worker}: {message}")


class WorkerUnreachable(WorkerError):
    """The connection could not be made or broke. Prefill is safe to retry, decode until its first token.

    Attributes:
        refused: nobody listens at the address: the process is certainly gone.
    """

    def __init__(self, worker: str, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(worker, message)


class WorkerTimeout(WorkerError):
    """The worker is connected and silent past its deadline."""


class WorkerRefused(WorkerError):
    """The worker answered with an HTTP error.

    Attributes:
        status: its HTTP status.
        error: its OpenAI error object: ``message``, ``type``, ``param``, ``code``.
        retry_after: its Retry-After header, if it sent one.
    """

    def __init__(
        self, worker: str, status: int, error: dict[str, object], retry_after: str | None = None
    ) -> None:
        self.status = status
        self.error = error
        self.retry_after = retry_after
        super().__init__(worker, f"answered {status}: {error.get('message')}")


class KvTransferFailed(WorkerError):
    """The decode worker could not fetch the request's KV cache; a new prefill is needed."""


class RequestRejected(ConductorError):
    """A request that is not served; the message is for the client.

    Attributes:
        status: HTTP status of the answer.
        kind: the ``type`` of the OpenAI error object.
        code: machine-readable reason; also the label of the rejection in the metrics.
        param: the field of the request that is wrong, if it is one.
        retry_after_s: when to come back, if that may help.
    """

    status = 400
    kind = "invalid_request_error"

    def __init__(
        self, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def error_object(self) -> dict[str, object]:
        """The OpenAI error object for this rejection."""
        return {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}

    def headers(self) -> dict[str, str]:
        """Headers that go with the answer."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class InvalidRequest(RequestRejected):
    """The request cannot be served as it is. A retry fails the same way."""


class BodyTooLarge(InvalidRequest):
    """The request's body is over the configured size."""

    status = 413


class ModelUnknown(RequestRejected):
    """No worker serves the model."""

    status = 404


class NoWorker(RequestRejected):
    """The model is known and no worker can serve it right now. A retry may succeed."""

    status = 503
    kind = "service_unavailable"
