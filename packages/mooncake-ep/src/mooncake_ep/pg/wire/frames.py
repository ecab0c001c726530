"""What goes over a connection: a header of 32 bytes, and as many bytes as it says."""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

from mooncake_ep.pg.wire.agreement import Completed, Message, NewView, Out, Suspects, View

__all__ = ["HEADER", "Header", "Kind", "Lane", "decode", "encode", "header", "pack"]

HEADER = struct.Struct("<BxxxIQqQ")


class Lane(enum.IntEnum):
    """The connections of two ranks: none waits for what another one carries."""

    CONTROL = 0
    DATA = 1
    MESSAGES = 2


class Kind(enum.IntEnum):
    """What a frame is. OPEN: a rank begins an operation; DATA: a part of one; BOOK: addresses of ranks."""

    BEAT = 0
    OPEN = 1
    DATA = 2
    COMPLETED = 3
    SUSPECTS = 4
    NEW_VIEW = 5
    OUT = 6
    BOOK = 7
    MESSAGE = 8


class Header(NamedTuple):
    """`slot`: which part of the operation. `op`: an operation's number, or the tag of a message."""

    kind: int
    slot: int
    view: int
    op: int
    nbytes: int


def header(kind: Kind, nbytes: int = 0, *, view: int = 0, op: int = 0, slot: int = 0) -> bytes:
    """Return the bytes of a header."""
    return HEADER.pack(kind, slot, view, op, nbytes)


def pack(kind: Kind, body: Any) -> tuple[bytes, bytes]:
    """Return header and payload of a body in JSON."""
    payload = json.dumps(body).encode()
    return header(kind, len(payload)), payload


def encode(message: Message) -> tuple[bytes, bytes]:
    """Return header and payload of what the agreement says."""
    if isinstance(message, Completed):
        return header(Kind.COMPLETED, view=message.view, op=message.op), b""
    if isinstance(message, Out):
        return header(Kind.OUT), b""
    if isinstance(message, Suspects):
        told = [message.view, sorted(message.ranks), message.ended, sorted(message.completed)]
        return pack(Kind.SUSPECTS, told)
    view = message.view
    return pack(Kind.NEW_VIEW, [message.before, view.number, view.key, view.lives, message.ended])


def decode(head: Header, payload: bytes) -> Message | None:
    """Return what the agreement is told by a frame; None for a frame that is not for it."""
    if head.kind == Kind.COMPLETED:
        return Completed(head.view, head.op)
    if head.kind == Kind.OUT:
        return Out()
    if head.kind == Kind.SUSPECTS:
        view, ranks, ended, completed = json.loads(payload)
        return Suspects(view, frozenset(ranks), ended, frozenset(completed))
    if head.kind == Kind.NEW_VIEW:
        before, number, key, lives, ended = json.loads(payload)
        return NewView(before, View(number, key, tuple((rank, life) for rank, life in lives)), ended)
    return None
