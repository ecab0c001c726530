"""How the processes of a group find each other: once, over torch's store; afterwards it is not needed.

Every process tells the store where it holds the group's block of shared memory open, so whoever comes later
can get it from anybody who is still alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from mooncake_ep._core import GroupEngine
from mooncake_ep.pg.errors import GroupTimeout, GroupUnavailable
from mooncake_ep.pg.options import MooncakeBackendOptions
from mooncake_ep.pg.work import error_of

__all__ = ["make_engine"]

_POLL_S = 0.001


def make_engine(
    store: Any, rank: int, size: int, options: MooncakeBackendOptions, timeout: timedelta
) -> GroupEngine:
    """Make or open the group and become its `rank`; with `is_extension`, wait at its door.

    Raises GroupTimeout when others do not come, GroupUnavailable when they are of another host.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if options.is_extension:
        return _found_by(store, rank, options.capacity(size), deadline)
    members = options.first_members(size)
    if rank not in members:
        raise GroupUnavailable(
            f"rank {rank} is not active from the start; give is_extension=True to a process that comes later"
        )
    capacity = options.capacity(size)
    if rank == members[0]:
        engine = _tried(lambda: GroupEngine(capacity, rank, 0, 0))
    else:
        store.wait([f"at/{members[0]}"], timeout)
        engine = _opened(store, rank, members[0])
    engine.claim()
    _announce(store, rank, engine)
    while not engine.claimed(members):
        if time.monotonic() > deadline:
            raise GroupTimeout(f"not all of the ranks {members} came within {timeout}; are they all started?")
        time.sleep(_POLL_S)
    result = engine.found(members, max(deadline - time.monotonic(), 1.0))
    if (error := error_of(result)) is not None:
        raise error
    return engine


def _announce(store: Any, rank: int, engine: GroupEngine) -> None:
    pid, fd = engine.address
    store.set(f"at/{rank}", f"{_host()} {pid} {fd}")


def _opened(store: Any, rank: int, holder: int) -> GroupEngine:
    host, pid, fd = store.get(f"at/{holder}").decode().split()
    if host != _host():
        raise GroupUnavailable(
            f"rank {holder} is on another host, or in another PID namespace, than rank {rank}; "
            "the ranks of a group must share a host, as yet: use gloo between hosts"
        )
    return _tried(lambda: GroupEngine(0, rank, int(pid), int(fd)))


def _tried(make: Callable[[], GroupEngine]) -> GroupEngine:
    try:
        return make()
    except RuntimeError as error:
        raise GroupUnavailable(str(error)) from error


def _found_by(store: Any, rank: int, capacity: int, deadline: float) -> GroupEngine:
    """Open the group through any process that still has it."""
    while True:
        reasons = []
        for holder in _holders(store, capacity, rank):
            try:
                engine = _opened(store, rank, holder)
            except GroupUnavailable as reason:
                reasons.append(str(reason))
                continue
            _announce(store, rank, engine)
            return engine
        if time.monotonic() > deadline:
            raise GroupTimeout(f"no process of the group can be reached: {reasons or 'none is in the store'}")
        time.sleep(_POLL_S)


def _holders(store: Any, capacity: int, rank: int) -> Iterator[int]:
    for holder in range(capacity):
        if store.check([f"at/{holder}"]):
            yield holder


def _host() -> str:
    """Name what processes must share to open each other's memory: the running kernel, the PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
