"""The exceptions of this package, for users and plugins."""

from mooncake_conductor._errors import (
    BodyTooLarge,
    ConductorError,
    ConfigError,
    InvalidRequest,
    KvTransferFailed,
    ListenFailed,
    ModelUnknown,
    NoWorker,
    RequestRejected,
    TraceUnreadable,
    WorkerError,
    WorkerRefused,
    WorkerTimeout,
    WorkerUnreachable,
)

__all__ = [
    "BodyTooLarge",
    "ConductorError",
    "ConfigError",
    "InvalidRequest",
    "KvTransferFailed",
    "ListenFailed",
    "ModelUnknown",
    "NoWorker",
    "RequestRejected",
    "TraceUnreadable",
    "WorkerError",
    "WorkerRefused",
    "WorkerTimeout",
    "WorkerUnreachable",
]
