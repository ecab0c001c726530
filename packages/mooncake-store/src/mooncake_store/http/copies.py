"""Replicas and draining over HTTP. Segments are named by their ids in hexadecimal, as the page shows them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mooncake_store.http.objects import Keys, decoded_key
from mooncake_store.http.problems import Problem
from mooncake_store.http.service import HttpService

__all__ = ["copy_object", "drain_segment", "find_replicas", "move_object", "replicate_objects"]

JSON = "application/json"
LONGEST_WAIT_S = 60.0


class Copied(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to copy or move a value."""

    key: str
    target: str
    source: str = ""
    encoding: Literal["text", "hex"] = "text"
    timeout_s: float = 30.0


class Replicated(Keys, forbid_unknown_fields=True, kw_only=True):
    """Body of a request for replicas of many values."""

    replicas: int
    timeout_s: float = 30.0


class DrainedSegment(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to drain a segment, or (``on`` false) to let it take values again."""

    segment: str
    on: bool = True
    timeout_s: float = 0.0


async def copy_object(service: HttpService, request: Request) -> Response:
    """Make a replica of a value in a segment."""
    asked = await service.decoded(request, Copied)
    key, target = decoded_key(asked.key.encode(), asked.encoding), _segment(asked.target)
    await service.store.copy(key, target, timeout_s=min(asked.timeout_s, LONGEST_WAIT_S))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def move_object(service: HttpService, request: Request) -> Response:
    """Make a replica of a value in one segment in place of that in another one."""
    asked = await service.decoded(request, Copied)
    key = decoded_key(asked.key.encode(), asked.encoding)
    places = _segment(asked.source), _segment(asked.target)
    await service.store.move(key, *places, timeout_s=min(asked.timeout_s, LONGEST_WAIT_S))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def replicate_objects(service: HttpService, request: Request) -> Response:
    """Have so many replicas of values from now on."""
    asked = await service.decoded(request, Replicated)
    keys = asked.as_bytes(service.limits.max_batch_keys)
    timeout_s = min(asked.timeout_s, LONGEST_WAIT_S)
    outcomes = await service.store.replicate(keys, asked.replicas, timeout_s=timeout_s)
    return _json({"outcomes": [outcome.name.lower() for outcome in outcomes]})


async def find_replicas(service: HttpService, request: Request) -> Response:
    """In which segments replicas of values lie."""
    keys = (await service.decoded(request, Keys)).as_bytes(service.limits.max_batch_keys)
    found = await service.store.batch_replicas(keys)
    return _json({"replicas": [None if one is None else [f"{id:x}" for id in one] for one in found]})


async def drain_segment(service: HttpService, request: Request) -> Response:
    """Let a segment become empty, and tell how far it is; ask again until it is ``done`` or ``stuck``."""
    asked = await service.decoded(request, DrainedSegment)
    segment = _segment(asked.segment)
    if asked.on:
        shown = await service.store.drain(segment, timeout_s=min(asked.timeout_s, LONGEST_WAIT_S))
    else:
        shown = await service.store.stop_draining(segment)
    return _json({**msgspec.structs.asdict(shown), "segment": f"{segment:x}"})


def _segment(name: str) -> int:
    try:
        number = int(name, 16)
    except ValueError:
        number = 0
    if not 0 < number < 1 << 64:
        raise Problem(
            HTTPStatus.BAD_REQUEST, "parameter-invalid", f"{name!r:.40} is no segment's id in hexadecimal"
        )
    return number


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)
