"""Gives the store's modules the simulation's clocks, threads and chance, and takes them back."""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import mooncake_store.cluster.master
from mooncake_store import client, membership
from mooncake_store.cluster import finder
from mooncake_store.master import joining, server
from mooncake_store.tiers import buckets, file_tier
from simulated.disk import Disk, SimFiles, SimWorkers
from simulated.scheduler import Scheduler
from simulated.threads import Condition, random_of, secrets_of, threading_of, time_of

__all__ = ["simulated_modules", "substituted"]

# What runs outside of it: commands, pages, and what has real files, sockets and threads.
OUTSIDE = ("cli", "commands", "http", "testing", "aio", "kv_events", "metrics", "tiers")
INSIDE = (
    "tiers.owner",
    "tiers.losses",
    "tiers.staging",
    "tiers.reading",
    "tiers.contract",
    "tiers.file_tier",
    "tiers.buckets",
    "tiers.folder",
)
REAL = {"threading": threading, "time": time, "secrets": secrets, "random": random}


def simulated_modules() -> list[ModuleType]:
    """The modules of the store that run inside of the simulation."""
    found = []
    for name, module in sorted(sys.modules.items()):
        package, _, inner = name.partition(".")
        if package != "mooncake_store":
            continue
        if inner in INSIDE or inner.partition(".")[0] not in OUTSIDE:
            found.append(module)
    return found


def escapes(module: ModuleType) -> list[str]:
    """What of a module would reach the real clocks or threads all the same."""
    real = {value for source in REAL.values() for value in vars(source).values() if callable(value)}
    kept = []
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            kept += [f"{module.__name__}.{name}" for default in defaults if _is_any(default, real)]
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner, method in vars(value).items():
                if isinstance(method, FunctionType):
                    defaults = [*(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values()]
                    kept += [f"{module.__name__}.{name}.{inner}" for d in defaults if _is_any(d, real)]
        elif _is_any(value, real):
            kept.append(f"{module.__name__}.{name}")
    return kept


def _is_any(value: object, real: set[Any]) -> bool:
    return callable(value) and getattr(value, "__module__", None) in REAL and value in real


@contextmanager
def substituted(scheduler: Scheduler, open_coordination: Any) -> Iterator[None]:
    """For as long as the context lasts."""

    def disk() -> Disk:
        found = scheduler.here().process.machine.disk
        assert isinstance(found, Disk)
        return found

    given = {
        "threading": threading_of(scheduler),
        "time": time_of(scheduler),
        "secrets": secrets_of(scheduler),
        "random": random_of(scheduler),
    }
    before: list[tuple[ModuleType, str, Any]] = []

    def put(module: ModuleType, name: str, value: Any) -> None:
        before.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    try:
        for module in simulated_modules():
            for name, real in REAL.items():
                if vars(module).get(name) is real:
                    put(module, name, given[name])
        put(membership, "this_machine", lambda: _number_of(scheduler.here().process.machine.name))
        put(mooncake_store.cluster.master, "open_coordination", open_coordination)
        put(finder, "open_coordination", open_coordination)
        # The desk is compiled, and knows real time only; its Python twin does all of its work here.
        put(server, "lock_of", lambda state: Condition(scheduler))
        put(joining, "FEATURES", ())
        # So are quick calls; what they leave to Python does all of their work here.
        put(client, "open_quick", lambda *_: None)
        put(client, "is_cluster", lambda master: master.startswith("sim:"))
        put(file_tier, "Workers", SimWorkers)
        put(file_tier, "open_files", lambda way, **_: SimFiles(disk()))
        put(file_tier, "lock_folder", lambda folder: disk().lock_folder(folder))
        for module in (file_tier, buckets):
            put(module, "os", _System(disk))
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)


class _System:
    """``os`` of the machine of the task that asks."""

    def __init__(self, disk: Callable[[], Disk]) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk().system, name)


def _number_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") << 1 | 1
