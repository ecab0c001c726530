"""Messages as msgpack arrays with the message's name first."""

from __future__ import annotations

import functools
import operator

import msgspec

from mooncake_store.protocol import access, adoption, copies, fencing, joining, objects, report, stats, tiers
from mooncake_store.protocol.base import Done, Limited, Message, Reply, Request, Stale

__all__ = ["GROUPS", "decode_reply", "decode_request", "encode"]

# A group of messages is a module with REQUESTS and REPLIES; this is the one place where it is entered.
GROUPS = (adoption, access, copies, fencing, joining, objects, stats, report, tiers)

_requests = tuple(message for group in GROUPS for message in group.REQUESTS)
_replies = (Done, Limited, Stale, *(message for group in GROUPS for message in group.REPLIES))
_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, _requests))
_reply_decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, _replies))


def encode(message: Message) -> bytes:
    """One message as bytes."""
    if type(message) is objects.Reserve and message.policy is not None:
        message = msgspec.structs.replace(message, policy=message.policy.on_wire())
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """A request from bytes. Raises msgspec.DecodeError."""
    request: Request = _request_decoder.decode(payload)
    return request


def decode_reply(payload: bytes) -> Reply:
    """A reply from bytes. Raises msgspec.DecodeError."""
    reply: Reply = _reply_decoder.decode(payload)
    return reply
