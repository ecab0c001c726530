"""How the processes of a group between hosts find each other: by addresses in torch's store."""

from __future__ import annotations

import json
import secrets
from datetime import timedelta
from typing import Any, NamedTuple

from mooncake_ep.pg.errors import GroupUnavailable
from mooncake_ep.pg.wire.engine import WireEngine
from mooncake_ep.pg.wire.greeting import Address, address_of, own_hosts

__all__ = ["Place", "found_between_hosts", "reach_between_hosts"]

_SECRET_BYTES = 16


class Place(NamedTuple):
    """Where a process is: the name of what it must share with others to open their memory, and the address
    under which it is reached; None: that of any interface.
    """

    host: str
    address: str | None


def found_between_hosts(
    store: Any, rank: int, members: list[int], capacity: int, place: Place, timeout: timedelta
) -> WireEngine:
    """Be one of the first members, who all know each other's address on return."""
    if rank == members[0]:
        store.set("wire/secret", secrets.token_hex(_SECRET_BYTES))
    engine = _made(store, rank, capacity, place, timeout)
    store.wait([f"wire/{one}" for one in members], timeout)
    engine.know({one: _address(store, one) for one in members})
    return engine


def reach_between_hosts(store: Any, rank: int, capacity: int, place: Place, timeout: timedelta) -> WireEngine:
    """Be a process that comes later; it works alone until it joins."""
    engine = _made(store, rank, capacity, place, timeout)
    there = [one for one in range(capacity) if one != rank and store.check([f"wire/{one}"])]
    engine.know({one: _address(store, one) for one in there})
    return engine


def _made(store: Any, rank: int, capacity: int, place: Place, timeout: timedelta) -> WireEngine:
    if not 0 <= rank < capacity:
        raise GroupUnavailable(
            f"rank {rank} is outside of a group of up to {capacity} ranks; set max_group_size"
        )
    store.wait(["wire/secret"], timeout)
    secret = bytes.fromhex(store.get("wire/secret").decode())
    hosts = (place.address,) if place.address else own_hosts()
    engine = WireEngine(capacity, rank, secret, hosts, place.host)
    store.set(f"wire/{rank}", json.dumps(engine.address()))
    return engine


def _address(store: Any, rank: int) -> Address:
    return address_of(json.loads(store.get(f"wire/{rank}")))
