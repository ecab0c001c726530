"""Calls of the store, from a client whose owner is another process, beside upstream's store and Redis."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import peers
from rows import VALUE, Row, Target
from spinners import IDLE
from transfer.cases import (
    KEY_RATE,
    KIB,
    LATENCY,
    MIB,
    OBJECT_RATE,
    RATE,
    REDIS,
    UPSTREAM_STORE,
    Case,
    Operation,
    at_least,
    at_most,
)
from transfer.command import PACE, QUICK_PACE, compared_rows
from transfer.contestants import AGENTS, Progress, Started, starting

SHM, TCP = "ours-store-shm", "ours-store-tcp"
Keys = functools.partial(Case, conditions=(IDLE,))


def cases() -> list[Case]:
    """The speed table of the store's calls."""
    found = []
    for driver, times in ((SHM, 4.0), (TCP, 1.5)):
        for size in (64 * KIB, MIB, 16 * MIB):
            for op in ("get", "put"):
                peer = (UPSTREAM_STORE, REDIS) if driver == SHM else (UPSTREAM_STORE,)
                targets = (at_least(times), None) if driver == SHM else (at_least(times),)
                found.append(Keys(driver, Operation(op, size), RATE, peer, targets))
    for op in ("get", "put"):
        many = Operation(op, 4 * KIB, 128)
        found.append(Keys(SHM, many, OBJECT_RATE, (UPSTREAM_STORE, REDIS), (at_least(3.0), None)))
    single = Operation("get as bytes", 4 * KIB)
    found.append(Keys(SHM, single, LATENCY, (UPSTREAM_STORE, REDIS), (at_most(0.5), None)))
    found.append(Keys(SHM, Operation("get", 4 * KIB), LATENCY, (UPSTREAM_STORE,), (at_most(0.5),)))
    asked = Operation("exist", 256, 1000)
    found.append(
        Keys(SHM, asked, KEY_RATE, (UPSTREAM_STORE, REDIS), (Target(VALUE, at_least=3.0), at_least(1.0)))
    )
    return found


def call_rows(
    wanted: Callable[[str], bool], folder: Path | None, quick: bool, progress: Progress
) -> list[Row]:
    """Measure the calls whose name is wanted."""
    chosen = [case for case in cases() if wanted(case.what)]
    return compared_rows(
        chosen, folder, QUICK_PACE if quick else PACE, progress, bench="store", start=_started
    )


def _started(names: Iterable[str], folder: Path | None, progress: Progress) -> Started:
    return starting(names, lambda name: _command(name, folder), progress)


def _command(name: str, folder: Path | None) -> list[str]:
    if name in (SHM, TCP):
        return [sys.executable, str(AGENTS / "store_ours.py"), "--driver", name.removeprefix("ours-store-")]
    if folder is None:
        raise peers.PeerMissing("peers were not asked for (--without-peers)")
    if name == UPSTREAM_STORE:
        return [str(peers.python_of(peers.UPSTREAM, folder)), str(AGENTS / "store_upstream.py")]
    if shutil.which("redis-server") is None:
        raise peers.PeerMissing("redis-server is not installed: apt-get install redis-server")
    return [str(peers.python_of(peers.REDIS, folder)), str(AGENTS / "store_redis.py")]
