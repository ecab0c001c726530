"""Errors as RFC 9457 problem details."""

from __future__ import annotations

import math
import re
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mooncake_store._errors import (
    ConfigError,
    CopyFailed,
    KeyExists,
    KeyInvalid,
    KeyNotFound,
    LeaseExpired,
    MasterRefused,
    MasterUnreachable,
    NotAuthorised,
    OwnerUnreachable,
    PutFailed,
    QuotaExceeded,
    RateLimited,
    SizeMismatch,
    StoreClosed,
    StoreError,
    StoreFull,
    ValueInvalid,
)

__all__ = ["MEDIA_TYPE", "Problem", "answer", "problem_of", "type_of"]

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
# The nearest class counts.
STATUS: dict[type[StoreError], HTTPStatus] = {
    KeyNotFound: HTTPStatus.NOT_FOUND,
    KeyExists: HTTPStatus.CONFLICT,
    LeaseExpired: HTTPStatus.SERVICE_UNAVAILABLE,
    KeyInvalid: HTTPStatus.BAD_REQUEST,
    ValueInvalid: HTTPStatus.BAD_REQUEST,
    SizeMismatch: HTTPStatus.CONFLICT,
    ConfigError: HTTPStatus.BAD_REQUEST,
    StoreFull: HTTPStatus.INSUFFICIENT_STORAGE,
    QuotaExceeded: HTTPStatus.INSUFFICIENT_STORAGE,
    RateLimited: HTTPStatus.TOO_MANY_REQUESTS,
    OwnerUnreachable: HTTPStatus.SERVICE_UNAVAILABLE,
    PutFailed: HTTPStatus.SERVICE_UNAVAILABLE,
    CopyFailed: HTTPStatus.CONFLICT,
    MasterUnreachable: HTTPStatus.SERVICE_UNAVAILABLE,
    MasterRefused: HTTPStatus.BAD_GATEWAY,
    NotAuthorised: HTTPStatus.FORBIDDEN,
    StoreClosed: HTTPStatus.SERVICE_UNAVAILABLE,
    StoreError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
ROOM = ("wanted_bytes", "capacity_bytes", "free_bytes", "evictable_bytes", "leased_bytes", "reserved_bytes")


class Problem(Exception):
    """A request that is not served, for a reason that is no error of the store.

    Attributes:
        kind: what it is, in words joined by hyphens.
        headers: of the answer.
    """

    def __init__(
        self, status: HTTPStatus, kind: str, detail: str, headers: dict[str, str] | None = None
    ) -> None:
        self.status, self.kind, self.detail = status, kind, detail
        self.headers = headers or {}
        super().__init__(detail)


def type_of(kind: type[StoreError]) -> str:
    """The kind of a problem that an error of the store is: KeyNotFound is ``key-not-found``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


def problem_of(error: StoreError) -> tuple[Problem, dict[str, int]]:
    """The problem that an error of the store is, and what it says beside text."""
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    retry = status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}
    if isinstance(error, RateLimited):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    more = {name: getattr(error, name) for name in ROOM} if isinstance(error, StoreFull) else {}
    return Problem(status, type_of(type(error)), str(error), headers), more


def answer(request: Request, problem: Problem, more: dict[str, int] | None = None) -> Response:
    """The answer that tells a problem."""
    body = {
        "type": f"urn:mooncake-store:{problem.kind}",
        "title": problem.kind.replace("-", " ").capitalize(),
        "status": int(problem.status),
        "detail": problem.detail,
        "instance": request.url.path,
        **(more or {}),
    }
    return Response(
        b"" if request.method == "HEAD" else msgspec.json.encode(body),
        problem.status,
        problem.headers,
        MEDIA_TYPE,
    )
