"""Answers who asks for a region by its name and access key."""

from __future__ import annotations

import hmac
import weakref
from typing import TYPE_CHECKING

import msgspec

from mooncake_transfer import _wire
from mooncake_transfer._errors import EngineClosed, RegionRefused
from mooncake_transfer.peer import Caller

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine


class RegionsByName:
    """Handler of REGION_METHOD: a region's descriptor for who knows its name and key."""

    def __init__(self, engine: weakref.ref[TransferEngine]):
        self._engine = engine

    def __call__(self, body: bytes, caller: Caller) -> bytes:
        """Answer one query."""
        query = msgspec.msgpack.decode(body, type=_wire.RegionQuery)
        engine = self._engine()
        if engine is None:
            raise EngineClosed("the engine is closing")
        with engine._lock:
            named = [region for region in engine._regions.values() if region.name == query.name]
        for region in named:
            if hmac.compare_digest(region.key, query.key):
                return region.descriptor()
        # One answer for both mistakes: who has no key does not learn which names exist.
        raise RegionRefused(f"no region named {query.name!r} has this access key")
