"""What the handlers of the HTTP interface share."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mooncake_store._errors import ConfigError, StoreError
from mooncake_store.aio import AsyncStore
from mooncake_store.http.problems import Problem, answer, problem_of

__all__ = ["Handler", "HttpLimits", "HttpService"]

T = TypeVar("T")

log = logging.getLogger(__name__)


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one server takes. Raises ConfigError for values that cannot work.

    Attributes:
        max_object_bytes: largest value that is taken.
        max_pending_bytes: of all values together that are on their way in; more are told to come back.
        max_batch_keys: keys in one request.
        chunk_bytes: how much of a value is in this process's memory at a time while it is sent.
    """

    max_object_bytes: int = 1 << 30
    max_pending_bytes: int = 4 << 30
    max_batch_keys: int = 10_000
    chunk_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(slots=True)
class HttpService:
    """One HTTP interface to one store.

    Attributes:
        store: what it serves.
        token: what clients have to show; empty: nothing.
        limits: what it takes.
        pending_bytes: of values that are on their way in.
    """

    store: AsyncStore
    token: str = ""
    limits: HttpLimits = field(default_factory=HttpLimits)
    pending_bytes: int = 0

    def endpoint(self, handler: Handler, *, secret: bool) -> Callable[[Request], Awaitable[Response]]:
        """The handler for those who may, with its errors told as problems."""

        async def answered(request: Request) -> Response:
            try:
                if secret:
                    self._admit(request)
                return await handler(self, request)
            except Problem as problem:
                return answer(request, problem)
            except StoreError as error:
                return answer(request, *problem_of(error))

        return answered

    def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self.token and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise Problem(
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                "a token is needed: Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    async def decoded(self, request: Request, kind: type[T]) -> T:
        """The JSON body of a request. Raises Problem."""
        # A browser lets pages of any site post text here unasked, but not JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Problem(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "media-type-unsupported",
                "the body must be JSON, and say so: Content-Type: application/json",
            )
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.limits.max_object_bytes:
                raise too_large(self.limits.max_object_bytes)
        try:
            return msgspec.json.decode(bytes(body), type=kind)
        except msgspec.MsgspecError as error:
            raise Problem(HTTPStatus.BAD_REQUEST, "body-invalid", f"{error}; see /docs") from None

    @asynccontextmanager
    async def room_for_body(self) -> AsyncIterator[Callable[[int], None]]:
        """Gives what takes room for so many bytes of a body; it raises Problem when there is none."""
        taken = 0

        def take(nbytes: int) -> None:
            nonlocal taken
            if taken + nbytes > self.limits.max_object_bytes:
                raise too_large(self.limits.max_object_bytes)
            if self.pending_bytes + nbytes > self.limits.max_pending_bytes:
                raise Problem(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "busy",
                    f"{self.pending_bytes} bytes of other values are on their way in, at most "
                    f"{self.limits.max_pending_bytes} are taken at a time; come back",
                    {"Retry-After": "1"},
                )
            taken += nbytes
            self.pending_bytes += nbytes

        try:
            yield take
        finally:
            self.pending_bytes -= taken


Handler = Callable[[HttpService, Request], Awaitable[Response]]


def too_large(limit: int) -> Problem:
    """The problem of a body over ``limit`` bytes."""
    return Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body-too-large", f"at most {limit} bytes are taken at a time"
    )
