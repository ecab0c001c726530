"""What ``Region.descriptor()`` returns, to and from bytes."""

from __future__ import annotations

import msgspec

from mooncake_transfer import _wire
from mooncake_transfer._arguments import payload
from mooncake_transfer._errors import ConfigError, PeerIncompatible

__all__ = ["check_protocol", "decode_descriptor"]


def decode_descriptor(descriptor: bytes) -> _wire.Descriptor:
    """Read a descriptor. Raises ConfigError for what is none, PeerIncompatible for one of another version."""
    payload(descriptor, "descriptor", "Region.descriptor()")
    try:
        found = msgspec.msgpack.decode(descriptor, type=_wire.Descriptor)
    except msgspec.MsgspecError as error:
        # Other versions may have other fields, but all begin with the protocol.
        theirs = _wire.protocol_of(descriptor)
        if theirs is not None:
            check_protocol(theirs, "the descriptor")
        raise ConfigError(f"{len(descriptor)} bytes are no region descriptor: {error}") from None
    check_protocol(found.protocol, f"the descriptor of region {found.name!r} of {found.address}")
    return found


def check_protocol(theirs: int, whose: str) -> None:
    """Raise PeerIncompatible when an engine of that protocol cannot be talked to."""
    if theirs != _wire.PROTOCOL:
        raise PeerIncompatible(
            f"{whose} speaks protocol {theirs}, this engine {_wire.PROTOCOL}; "
            "install versions of mooncake-transfer that fit together"
        )
