"""One seed, from the start of a store to its end."""

from __future__ import annotations

import gc
import logging
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mooncake_store.cluster.master import ClusterMaster
from mooncake_store.master import server
from mooncake_store.master.context import MasterContext
from mooncake_store.own_segment import OwnSegment
from simulated.checks import check_now
from simulated.cluster import CONFIG, Cluster
from simulated.ending import check_end
from simulated.faults import Faults
from simulated.history import Violation
from simulated.scheduler import Scheduler
from simulated.substitution import substituted

__all__ = ["Outcome", "run_seed"]

QUIET_S, FAULTY_S, MENDED_S = 1.0, 20.0, 4.0
LOOK_S = 0.1
MEMORY = Path("/dev/shm")  # where there is one, its files cost no disk


@dataclass
class Outcome:
    """What became of one seed.

    Attributes:
        failure: what went wrong; empty when nothing did.
        trace: a checksum of all that happened: the same for the same seed and code.
        faults: how many of each kind were injected.
    """

    seed: int
    failure: str = ""
    trace: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    events: int = 0
    calls: int = 0
    reads: int = 0
    ordered: int = 0
    misses: int = 0
    stored: int = 0
    virtual_s: float = 0.0
    notes: list[str] = field(default_factory=list)


def run_seed(seed: int, *, notes: int = 0) -> Outcome:
    """Simulate one store with faults, and tell the last ``notes`` things that happened."""
    scheduler = Scheduler(seed)
    if notes:
        scheduler.notes = deque(maxlen=notes)
    outcome = Outcome(seed)
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder, _quiet():
        _simulate(outcome, scheduler, Path(folder))
    return outcome


def _simulate(outcome: Outcome, scheduler: Scheduler, folder: Path) -> None:
    cluster = Cluster(scheduler, folder)
    faults = Faults(cluster)
    began_s = scheduler.now_s
    with substituted(scheduler, cluster.open_coordination), _losses_noted(cluster):
        try:
            _run(scheduler, cluster, faults)
        except Violation as error:
            outcome.failure = str(error)
        for where, failed in scheduler.failures[:1]:
            outcome.failure = f"{where}: {''.join(traceback.format_exception(failed))}"
        _collect(outcome, scheduler, cluster, faults, began_s)
        for actor in cluster.actors:
            cluster.kill(actor)


def _run(scheduler: Scheduler, cluster: Cluster, faults: Faults) -> None:
    start_s = scheduler.now_s
    for actor in cluster.actors:
        scheduler.after(scheduler.random.uniform(0, 0.5), partial(cluster.start, actor))
    end_s = start_s + QUIET_S + FAULTY_S
    scheduler.after(QUIET_S, faults.begin)
    stopped = False
    while scheduler.now_s < end_s + MENDED_S:
        if scheduler.now_s >= end_s and not stopped:
            faults.stop()
            stopped = True
        scheduler.run(scheduler.now_s + LOOK_S)
        if scheduler.failures:
            return
        check_now(cluster, one_leader=scheduler.now_s - faults.forgot_s > 2 * CONFIG.leader_ttl_s)
    check_end(scheduler, cluster)


def _collect(
    outcome: Outcome, scheduler: Scheduler, cluster: Cluster, faults: Faults, began_s: float
) -> None:
    outcome.trace = scheduler.trace
    outcome.faults = faults.counts.copy()
    outcome.faults["coordination answer lost"] += cluster.service.faults
    outcome.events = scheduler.events
    outcome.notes = [f"{when_s:10.6f} {' '.join(map(str, what))}" for when_s, what in scheduler.notes or ()]
    outcome.calls = cluster.calls_ended
    outcome.virtual_s = scheduler.now_s - began_s
    for history in cluster.histories.values():
        outcome.reads += history.reads
        outcome.ordered += history.ordered
        outcome.misses += history.misses
        outcome.stored += history.stored


@contextmanager
def _quiet() -> Iterator[None]:
    """Logs of a store with faults are long; and the collector shall not run in the middle of a task."""
    before, collecting = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(before)
        if collecting:
            gc.enable()
        gc.collect()


@contextmanager
def _losses_noted(cluster: Cluster) -> Iterator[None]:
    """Learn of masters that come and go, and of owners that join and are dropped."""
    elected, drop, mounted = ClusterMaster._on_elected, MasterContext.drop, OwnSegment.mounted

    def on_elected(self: ClusterMaster, epoch: int) -> None:
        cluster.on_loss()
        elected(self, epoch)

    def on_drop(self: MasterContext, member: server.Member, why: str, *, left: bool = False) -> None:
        if member.segment:
            cluster.on_loss()
        drop(self, member, why, left=left)

    def on_mounted(self: OwnSegment, epoch: int, segment: int) -> None:
        cluster.on_loss()
        mounted(self, epoch, segment)

    ClusterMaster._on_elected = on_elected  # type: ignore[method-assign]
    MasterContext.drop = on_drop  # type: ignore[method-assign]
    OwnSegment.mounted = on_mounted  # type: ignore[method-assign]
    try:
        yield
    finally:
        ClusterMaster._on_elected = elected  # type: ignore[method-assign]
        MasterContext.drop = drop  # type: ignore[method-assign]
        OwnSegment.mounted = mounted  # type: ignore[method-assign]
