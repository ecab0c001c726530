"""What the metadata server and its clients say to each other, beyond plain HTTP: JSON."""

from __future__ import annotations

import hashlib

import msgspec

__all__ = ["DEFAULT_PORT", "Lost", "Removal", "Renewal", "etag"]

DEFAULT_PORT = 8290


class Renewal(msgspec.Struct, frozen=True):
    """Entries to keep for another ``ttl_s``: the tag of each value by its key."""

    ttl_s: float
    entries: dict[str, str]


class Lost(msgspec.Struct, frozen=True):
    """Those of them that have another value, or none."""

    keys: set[str]


class Removal(msgspec.Struct, frozen=True):
    """Entries to remove: the tag of each value by its key."""

    entries: dict[str, str]


def etag(value: bytes) -> str:
    """The tag of a value: 128 bits of BLAKE2b, so that who knows it knows the value."""
    return hashlib.blake2b(value, digest_size=16).hexdigest()
