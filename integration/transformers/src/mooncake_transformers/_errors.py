"""Exceptions of mooncake_transformers.

::

    WorkerError
    ├─ ConfigError     ─ DeviceUnavailable
    ├─ ModelError     ─ UnknownModel · UnsupportedModel · DefaultModelUnavailable
    ├─ PortTaken
    └─ RequestError   (an HTTP answer with a status and a code)
       ├─ 4xx, a retry fails again:
       │  MalformedRequest · UnsupportedParameter · ModelNotServed · ContextLengthExceeded · WrongRole
       ├─ 503, a retry may work:
       │  KVPoolExhausted · WorkerStopping
       ├─ 503, the prompt must be prefilled again:
       │  KVTransferFailed ─ HandoffUnknown · HandoffMismatch
       └─ 500: ModelFailed

Every message says what failed, on what, why, and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ConfigError",
    "ContextLengthExceeded",
    "DefaultModelUnavailable",
    "DeviceUnavailable",
    "HandoffMismatch",
    "HandoffUnknown",
    "KVPoolExhausted",
    "KVTransferFailed",
    "MalformedRequest",
    "ModelError",
    "ModelFailed",
    "ModelNotServed",
    "PortTaken",
    "RequestError",
    "UnknownModel",
    "UnsupportedModel",
    "UnsupportedParameter",
    "WorkerError",
    "WorkerStopping",
    "WrongRole",
]


class WorkerError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(WorkerError, ValueError):
    """An option has a value that cannot work; nothing was started."""


class DeviceUnavailable(ConfigError):
    """The torch device asked for is not there, or not one this torch knows; nothing was loaded."""


class ModelError(WorkerError):
    """The model cannot be served."""


class UnknownModel(ModelError):
    """There is no such folder, no such model on the hub, or no way to reach the hub."""


class UnsupportedModel(ModelError):
    """The model exists, but its state is not a cache of keys and values per token, so blocks cannot be
    reused.
    """


class DefaultModelUnavailable(ModelError):
    """The wheel with the default model could not be had."""


class PortTaken(WorkerError, OSError):
    """Another program listens on the port."""


class RequestError(WorkerError):
    """A request that fails with an HTTP answer.

    Attributes:
        status: HTTP status.
        kind: ``error.type`` of the OpenAI error object.
        code: ``error.code``; stable, for programs.
        param: the field of the request at fault, where one is.
    """

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class MalformedRequest(RequestError):
    """The body is no JSON, or a field is missing or has the wrong type."""

    code = "malformed_request"


class UnsupportedParameter(RequestError):
    """The field is known to OpenAI's API, and this worker cannot honour it. It is refused, never ignored."""

    code = "unsupported_parameter"


class ModelNotServed(RequestError):
    """The request names a model that this worker does not have."""

    status = 404
    code = "model_not_found"


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"


class WrongRole(RequestError):
    """The worker's role does not include this part of a request."""

    code = "wrong_role"


class KVPoolExhausted(RequestError):
    """No KV blocks became free in time. A retry may work."""

    status = 503
    kind = "server_error"
    code = "kv_pool_exhausted"


class WorkerStopping(RequestError):
    """The worker shuts down. Another one may take the request."""

    status = 503
    kind = "server_error"
    code = "worker_stopping"


class KVTransferFailed(RequestError):
    """The KV cache of the prompt could not be fetched from the prefill worker. The prompt must be prefilled
    again.
    """

    status = 503
    kind = "server_error"
    code = "kv_transfer_failed"


class HandoffUnknown(KVTransferFailed):
    """The prefill worker holds nothing under this transfer id: never held, fetched already, or expired."""


class HandoffMismatch(KVTransferFailed):
    """Both workers disagree on model, block layout or prompt; fetched bytes would be wrong."""


class ModelFailed(RequestError):
    """The model raised while it computed this request; the worker's log has the traceback."""

    status = 500
    kind = "server_error"
    code = "model_failed"
