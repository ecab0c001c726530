"""How the processes of a group find each other: once, over torch's store; afterwards it is not needed.

Every process tells the store where it is. Are all of the first ones on one host, they share memory
(`shared_bootstrap`), else they connect to each other (`wire.bootstrap`).
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mooncake_ep.pg import shared_bootstrap
from mooncake_ep.pg.engine import GroupEngine
from mooncake_ep.pg.errors import GroupTimeout, GroupUnavailable
from mooncake_ep.pg.options import SHARED, WIRE, MooncakeBackendOptions
from mooncake_ep.pg.wire.bootstrap import Place, found_between_hosts, reach_between_hosts
from mooncake_ep.pg.work import error_of

__all__ = ["make_engine"]


def make_engine(
    store: Any, rank: int, size: int, options: MooncakeBackendOptions, timeout: timedelta
) -> GroupEngine:
    """Make or find the group and become its `rank`; with `is_extension`, wait at its door.

    Raises GroupTimeout when others do not come, GroupUnavailable when they cannot be reached.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    capacity = options.capacity(size)
    try:
        if options.is_extension:
            store.wait(["engine"], timeout)
            if store.get("engine").decode() == WIRE:
                return reach_between_hosts(store, rank, capacity, Place(host_name(), options.host), timeout)
            return shared_bootstrap.found_by(store, rank, capacity, host_name(), deadline)
        members = options.first_members(size)
        if rank not in members:
            raise GroupUnavailable(
                f"rank {rank} is not active from the start; give is_extension=True to a process "
                "that comes later"
            )
        kind = _kind(store, rank, members, options.engine, timeout)
        engine: GroupEngine
        if kind == WIRE:
            engine = found_between_hosts(
                store, rank, members, capacity, Place(host_name(), options.host), timeout
            )
        else:
            engine = shared_bootstrap.gathered(store, rank, members, capacity, host_name(), deadline)
    except dist.DistStoreError as error:
        raise GroupTimeout(f"not all ranks came within {timeout}; are they all started? ({error})") from error
    failure = error_of(engine.found(members, max(deadline - time.monotonic(), 1.0)))
    if failure is not None:
        engine.close()
        raise failure
    if rank == members[0]:
        store.set("engine", kind)  # now that all can be found by whoever comes later
    return engine


def _kind(store: Any, rank: int, members: list[int], asked: str | None, timeout: timedelta) -> str:
    """Choose the engine: all of the first members come to the same."""
    store.set(f"host/{rank}", f"{asked or ''} {host_name()}")
    store.wait([f"host/{one}" for one in members], timeout)
    said = {one: store.get(f"host/{one}").decode().split(" ", 1) for one in members}
    wanted = {kind for kind, _ in said.values() if kind}
    one_host = len({host for _, host in said.values()}) == 1
    if len(wanted) > 1:
        raise GroupUnavailable(f"ranks ask for different engines, {sorted(wanted)}; give all of them one")
    kind = wanted.pop() if wanted else SHARED if one_host else WIRE
    if kind == SHARED and not one_host:
        raise GroupUnavailable(
            "the ranks are on several hosts, or in several PID or network namespaces, and cannot share "
            "memory; leave out engine='shared'"
        )
    return kind


def host_name() -> str:
    """Name what processes must share to open each other's memory: the running kernel, the namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net")]
    return "/".join([boot, *spaces])
