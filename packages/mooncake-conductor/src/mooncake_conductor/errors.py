"""The exceptions of this package, for users and plugins."""

from mooncake_conductor._errors import (
    BodyTooLarge,
    ConductorError,
    ConfigError,
    EventMalformed,
    InvalidRequest,
    KvTransferFailed,
    ListenFailed,
    ModelUnknown,
    NoWorker,
    PublisherClosed,
    RequestRejected,
    WorkerError,
    WorkerRefused,
    WorkerTimeout,
    WorkerUnreachable,
)

__all__ = [
    "BodyTooLarge",
    "ConductorError",
    "ConfigError",
    "EventMalformed",
    "InvalidRequest",
    "KvTransferFailed",
    "ListenFailed",
    "ModelUnknown",
    "NoWorker",
    "PublisherClosed",
    "RequestRejected",
    "WorkerError",
    "WorkerRefused",
    "WorkerTimeout",
    "WorkerUnreachable",
]
