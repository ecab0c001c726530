"""How the processes of one host find each other's memory.

Every process tells the store where it holds the group's block of shared memory open, so whoever comes later
can get it from anybody who is still alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from mooncake_ep._core import GroupEngine
from mooncake_ep.pg.errors import GroupTimeout, GroupUnavailable

__all__ = ["found_by", "gathered"]

_POLL_S = 0.001


def gathered(
    store: Any, rank: int, members: list[int], capacity: int, host: str, deadline: float
) -> GroupEngine:
    """Make or open the group's block and wait until all first members have."""
    if rank == members[0]:
        engine = _tried(lambda: GroupEngine(capacity, rank, 0, 0))
    else:
        store.wait([f"at/{members[0]}"])
        engine = _opened(store, rank, members[0], host)
    engine.claim()
    _announce(store, rank, host, engine)
    while not engine.claimed(members):
        if time.monotonic() > deadline:
            raise GroupTimeout(f"not all of the ranks {members} came in time; are they all started?")
        time.sleep(_POLL_S)
    return engine


def found_by(store: Any, rank: int, capacity: int, host: str, deadline: float) -> GroupEngine:
    """Open the group through any process that still has it."""
    while True:
        reasons = []
        for holder in _holders(store, capacity):
            try:
                engine = _opened(store, rank, holder, host)
            except GroupUnavailable as reason:
                reasons.append(str(reason))
                continue
            _announce(store, rank, host, engine)
            return engine
        if time.monotonic() > deadline:
            raise GroupTimeout(f"no process of the group can be reached: {reasons or 'none is in the store'}")
        time.sleep(_POLL_S)


def _announce(store: Any, rank: int, host: str, engine: GroupEngine) -> None:
    pid, fd = engine.address
    store.set(f"at/{rank}", f"{host} {pid} {fd}")


def _opened(store: Any, rank: int, holder: int, own_host: str) -> GroupEngine:
    host, pid, fd = store.get(f"at/{holder}").decode().split()
    if host != own_host:
        raise GroupUnavailable(
            f"rank {holder} is on another host, or in another PID or network namespace, than rank {rank}, "
            "and the group shares memory; make it with engine='wire' where ranks of other hosts come later"
        )
    return _tried(lambda: GroupEngine(0, rank, int(pid), int(fd)))


def _tried(make: Callable[[], GroupEngine]) -> GroupEngine:
    try:
        return make()
    except RuntimeError as error:
        raise GroupUnavailable(str(error)) from error


def _holders(store: Any, capacity: int) -> Iterator[int]:
    for holder in range(capacity):
        if store.check([f"at/{holder}"]):
            yield holder
