"""The express way: the five requests that matter for speed, in the fixed form of ``core/express.hpp``.

A master answers them without the interpreter, where there is nothing unusual about them; else the same
request goes the other way, as every other one (see codec).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from mooncake_store._core import express_answer, express_ask
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol.base import METHOD, Reply, Request
from mooncake_store.protocol.objects import (
    Commit,
    Committed,
    Exist,
    Found,
    Locate,
    Located,
    Placement,
    Release,
    Released,
    Reserve,
    Reserved,
)

__all__ = ["EXPRESS_FEATURE", "EXPRESS_METHOD", "OtherWay", "express_reply", "express_request", "other_way"]

EXPRESS_METHOD = f"{METHOD}.express"
EXPRESS_FEATURE = "express"
PLAIN = PutPolicy()  # says what no policy says
LOCATE, RELEASE, EXIST, RESERVE, COMMIT = range(1, 6)


class OtherWay(enum.IntEnum):
    """What goes the other way, as a master says that did nothing; the flags of kOtherWay in express.hpp."""

    FOR_A_MOMENT = 0
    THIS_ONE = 1
    FOR_GOOD = 2


def other_way(answer: bytes) -> OtherWay:
    """What an answer says for which :func:`express_reply` gives None."""
    return OtherWay(answer[1]) if len(answer) > 1 and answer[1] in set(OtherWay) else OtherWay.FOR_A_MOMENT


def express_request(request: Request) -> bytes | None:
    """The request as bytes; None when it cannot go this way."""
    pack = _requests.get(type(request))
    return None if pack is None else pack(request)


def express_reply(request: Request, answer: bytes) -> Reply | None:
    """What the master says; None when it has to be asked the other way. Raises ValueError."""
    found = express_answer(answer)
    return None if found is None else _replies[type(request)](found)


def _reserve(request: Reserve) -> bytes | None:
    if request.policy not in (None, PLAIN) or request.avoid or request.promoted:
        return None
    return express_ask(
        RESERVE,
        request.epoch,
        request.client,
        request.digests,
        request.ended,
        replace=request.if_exists == "replace",
        sizes=request.sizes,
        keys=request.keys,
    )


def _commit(request: Commit) -> bytes | None:
    if request.failed:
        return None
    return express_ask(
        COMMIT,
        request.epoch,
        request.client,
        id=request.reservation,
        seen=request.notices_seen,
        replace=request.if_exists == "replace",
        sums=request.sums,
    )


def _located(found: Any) -> Reply:
    lease, there, sizes, replicas, segments, sums = found
    nearest = Placement(rows=replicas[0], segments=segments)
    return Located(lease=lease, found=there, sizes=sizes, placement=nearest, others=replicas[1:], sums=sums)


def _reserved(found: Any) -> Reply:
    reservation, outcomes, rows, segments, room, wait = found
    placement = Placement(rows=rows, segments=segments)
    return Reserved(reservation=reservation, outcomes=outcomes, placement=placement, room=room, wait=wait)


_requests: dict[type[Request], Callable[[Any], bytes | None]] = {
    Locate: lambda asked: express_ask(
        LOCATE, asked.epoch, asked.client, asked.digests, asked.ended, summed=asked.summed
    ),
    Release: lambda asked: (
        None if asked.condemned else express_ask(RELEASE, asked.epoch, asked.client, id=asked.lease)
    ),
    Exist: lambda asked: express_ask(EXIST, asked.epoch, asked.client, asked.digests),
    Reserve: _reserve,
    Commit: _commit,
}
_replies: dict[type[Request], Callable[[Any], Reply]] = {
    Locate: _located,
    Release: lambda found: Released(expired=found[0], broken=found[1]),
    Exist: lambda found: Found(found=found),
    Reserve: _reserved,
    Commit: lambda found: Committed(outcomes=found[0], notices=found[1]),
}
