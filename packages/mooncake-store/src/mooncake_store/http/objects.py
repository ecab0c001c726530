"""Objects over HTTP."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Literal, TypedDict
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mooncake_store._errors import StoreError
from mooncake_store.aio_held import AsyncValueReader
from mooncake_store.http.problems import Problem
from mooncake_store.http.service import HttpService
from mooncake_store.keys import shown_key
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import IfExists

__all__ = [
    "delete_object",
    "delete_objects",
    "delete_pin",
    "end_session",
    "exist_objects",
    "get_object",
    "head_object",
    "list_objects",
    "put_object",
    "put_pin",
    "remove_objects",
]

OBJECTS, PINS = "/v1/objects/", "/v1/pins/"
OCTETS = "application/octet-stream"
JSON = "application/json"
RANGE = re.compile(r"bytes=(\d*)-(\d*)$")
LISTED = 1000
IF_EXISTS: tuple[IfExists, ...] = ("error", "keep", "replace")

log = logging.getLogger(__name__)


class Kept(TypedDict, total=False):
    """Parameters that say how a value is to be kept; see PutPolicy."""

    replicas: int
    priority: int
    group: str
    session: str
    hard_pin: bool
    soft_pin_s: float
    same_node: bool
    stripes: int


class Keys(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request about many keys: as text, or in hexadecimal."""

    keys: list[str]
    encoding: Literal["text", "hex"] = "text"

    def as_bytes(self, limit: int) -> list[bytes]:
        """The keys. Raises Problem."""
        if len(self.keys) > limit:
            raise Problem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "too-many-keys",
                f"{len(self.keys)} keys, at most {limit} are taken at a time",
            )
        return [decoded_key(key.encode(), self.encoding) for key in self.keys]


class Session(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request about a session."""

    session: str


def decoded_key(key: bytes, encoding: str) -> bytes:
    """A key as it was written in a request. Raises Problem."""
    if encoding == "text":
        return key
    try:
        return bytes.fromhex(key.decode())
    except ValueError:
        raise Problem(HTTPStatus.BAD_REQUEST, "key-invalid", f"{key!r:.80} is no hexadecimal key") from None


def key_of(request: Request, prefix: str = OBJECTS) -> bytes:
    """The key in the path of a request: percent-encoded, or hexadecimal with ``?key_encoding=hex``."""
    raw: bytes = request.scope["raw_path"]
    key = unquote_to_bytes(raw.partition(b"?")[0][len(prefix) :])
    encoding = request.query_params.get("key_encoding", "text")
    if encoding not in ("text", "hex"):
        raise Problem(
            HTTPStatus.BAD_REQUEST, "parameter-invalid", f"key_encoding is {encoding!r}, not text or hex"
        )
    return decoded_key(key, encoding)


async def put_object(service: HttpService, request: Request) -> Response:
    """Store the body."""
    key, if_exists = key_of(request), request.query_params.get("if_exists", "error")
    if if_exists not in IF_EXISTS:
        raise Problem(
            HTTPStatus.BAD_REQUEST, "parameter-invalid", f"if_exists is {if_exists!r}, not one of {IF_EXISTS}"
        )
    policy = _policy(request)
    async with service.room_for_body() as take:
        announced = int(request.headers.get("content-length", 0))
        take(announced)
        value, received = bytearray(announced), 0
        async for part in request.stream():
            if received + len(part) > len(value):  # a body of unknown length
                take(received + len(part) - len(value))
            value[received : received + len(part)] = part
            received += len(part)
        await service.store.put(key, memoryview(value)[:received], if_exists=if_exists, policy=policy)
    return Response(status_code=HTTPStatus.CREATED if if_exists == "error" else HTTPStatus.NO_CONTENT)


async def head_object(service: HttpService, request: Request) -> Response:
    """The size of a value."""
    nbytes = await service.store.size(key_of(request))
    headers = {"Content-Length": str(nbytes), "Accept-Ranges": "bytes"}
    return Response(headers=headers, media_type=OCTETS)


async def get_object(service: HttpService, request: Request) -> Response:
    """A value, or a range of it, sent in pieces while it is read under one lease."""
    reader = await service.store.open_value(key_of(request))
    try:
        start, end = _range(request.headers.get("range"), reader.nbytes)
    except Problem:
        await reader.give_up()
        raise
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(end - start)}
    status = HTTPStatus.OK
    if (start, end) != (0, reader.nbytes):
        status = HTTPStatus.PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{reader.nbytes}"
    pieces = _pieces(service, reader, start, end)
    return _Sent(reader, pieces, status, headers=headers, media_type=OCTETS)


class _Sent(StreamingResponse):
    """Gives the lease up whatever ends the answer. (Nobody closes the generator of an answer cut short.)"""

    def __init__(
        self, reader: AsyncValueReader, pieces: AsyncIterator[bytes], *args: Any, **more: Any
    ) -> None:
        super().__init__(pieces, *args, **more)
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reader.give_up()


async def _pieces(
    service: HttpService, reader: AsyncValueReader, start: int, end: int
) -> AsyncIterator[bytes]:
    """The bytes from ``start`` to ``end``; the last piece only when all of them are known to be right.

    Whoever has the whole length of the answer therefore has the right bytes; else the connection ends early.
    """
    chunk = service.limits.chunk_bytes
    try:
        last = b""
        for at in range(start, end, chunk):
            if last:
                yield last
            last = await reader.read(at, min(chunk, end - at))
        await reader.close()
        yield last
    except StoreError as error:
        log.warning("a value was cut short while it was sent: %s", error)
        raise


def _range(header: str | None, nbytes: int) -> tuple[int, int]:
    """Start and end of what a Range header asks for; all where there is none that is understood."""
    found = RANGE.match(header) if header else None
    if found is None or found.groups() == ("", ""):
        return 0, nbytes
    first, last = found.groups()
    start = int(first) if first else max(0, nbytes - int(last))
    end = min(int(last) + 1, nbytes) if first and last else nbytes
    if start >= end:
        raise Problem(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            "range-not-satisfiable",
            f"the value has {nbytes} bytes; {header!r} is outside of them",
            {"Content-Range": f"bytes */{nbytes}"},
        )
    return start, end


async def delete_object(service: HttpService, request: Request) -> Response:
    """Remove a value."""
    await service.store.remove(key_of(request))
    return Response(status_code=HTTPStatus.NO_CONTENT)


def _policy(request: Request) -> PutPolicy:
    """What the parameters of a request say of how a value is to be kept."""
    given = {name: text for name, text in request.query_params.items() if name in Kept.__annotations__}
    try:
        kept = msgspec.convert(given, Kept, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, "parameter-invalid", f"{error}") from None
    return PutPolicy(**kept)


async def list_objects(service: HttpService, request: Request) -> Response:
    """Keys and sizes of values."""
    asked = request.query_params
    try:
        limit = int(asked.get("limit", LISTED))
    except ValueError:
        limit = 0
    if limit < 1:
        raise Problem(HTTPStatus.BAD_REQUEST, "parameter-invalid", "limit is no number from 1 on")
    found = sorted(await service.store.ls(asked.get("pattern", ""), prefix=asked.get("prefix", "")))
    objects = [
        {"key": shown_key(key), "key_hex": key.hex(), "bytes": nbytes} for key, nbytes in found[:limit]
    ]
    body = {"objects": objects, "more": max(0, len(found) - limit)}
    return Response(msgspec.json.encode(body), media_type=JSON)


async def delete_objects(service: HttpService, request: Request) -> Response:
    """Remove the values whose keys match, or all."""
    asked = request.query_params
    if asked.get("all") == "true":
        removed = await service.store.remove_all()
    elif asked.get("pattern") or asked.get("prefix"):
        pattern, prefix = asked.get("pattern", ""), asked.get("prefix", "")
        removed = await service.store.remove_by_regex(pattern, prefix=prefix)
    else:
        raise Problem(HTTPStatus.BAD_REQUEST, "parameter-invalid", "give pattern or prefix, or all=true")
    return Response(msgspec.json.encode({"removed": removed}), media_type=JSON)


async def put_pin(service: HttpService, request: Request) -> Response:
    """Keep a value from being evicted."""
    text = request.query_params.get("soft_s")
    try:
        soft_s = None if text is None else float(text)
    except ValueError:
        raise Problem(
            HTTPStatus.BAD_REQUEST, "parameter-invalid", f"soft_s is {text!r}, no number of seconds"
        ) from None
    await service.store.pin(key_of(request, PINS), soft_s=soft_s)
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def delete_pin(service: HttpService, request: Request) -> Response:
    """End the pins of a value."""
    await service.store.unpin(key_of(request, PINS))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def end_session(service: HttpService, request: Request) -> Response:
    """Let the values of a session be the first to go."""
    count = await service.store.end_session((await service.decoded(request, Session)).session)
    return Response(msgspec.json.encode({"values": count}), media_type=JSON)


async def exist_objects(service: HttpService, request: Request) -> Response:
    """Which of many keys have values."""
    keys = (await service.decoded(request, Keys)).as_bytes(service.limits.max_batch_keys)
    found = await service.store.batch_exist(keys)
    return Response(msgspec.json.encode({"exist": found}), media_type=JSON)


async def remove_objects(service: HttpService, request: Request) -> Response:
    """Remove many values."""
    keys = (await service.decoded(request, Keys)).as_bytes(service.limits.max_batch_keys)
    removed = await service.store.batch_remove(keys)
    return Response(msgspec.json.encode({"removed": removed}), media_type=JSON)
