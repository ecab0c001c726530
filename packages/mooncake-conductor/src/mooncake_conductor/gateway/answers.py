"""Renders answers and errors the way OpenAI's API does."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from mooncake_conductor._errors import RequestRejected, WorkerRefused

__all__ = ["INTERNAL_ERROR", "error_answer", "json_answer"]

INTERNAL_ERROR = {
    "message": "The conductor failed on this request; its log has the reason.",
    "type": "server_error",
    "param": None,
    "code": "internal_error",
}


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer with a JSON body."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_answer(error: RequestRejected | WorkerRefused) -> Response:
    """The answer for a request that is not served.

    A worker's client errors (4xx) and its 503 pass through with their status, its other errors become 502.
    """
    if isinstance(error, RequestRejected):
        return json_answer({"error": error.error_object()}, error.status, error.headers())
    status = error.status if 400 <= error.status < 500 or error.status == 503 else 502
    headers = {} if error.retry_after is None else {"Retry-After": error.retry_after}
    return json_answer({"error": error.error}, status, headers)
