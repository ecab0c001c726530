"""What must hold once everything is mended: calls have ended, the store works, and nothing has leaked."""

from __future__ import annotations

from mooncake_store import Store, errors
from simulated.checks import check_now, leading
from simulated.cluster import CALL_LIMIT_S, CONFIG, Actor, Cluster
from simulated.history import Violation
from simulated.load import KEYS
from simulated.scheduler import Scheduler

__all__ = ["check_end"]

LOOK_S = 0.1
WORKS_S = 15.0
PASSING = (
    errors.MasterUnreachable,
    errors.StoreFull,
    errors.QuotaExceeded,
    errors.PutFailed,
    errors.KeyNotFound,
    errors.LeaseExpired,
)


def check_end(scheduler: Scheduler, cluster: Cluster) -> None:
    """Raises Violation."""
    cluster.load_over = True
    _until(scheduler, cluster, lambda: not cluster.busy, CALL_LIMIT_S, "calls that began have ended")
    _check_ghosts(scheduler, cluster)
    works: dict[str, bool] = {}
    for actor in cluster.actors:
        if actor.kind == "master":
            continue
        if actor.store is None:
            raise Violation(f"{actor.name} has not joined the store again")
        cluster.on(actor, "works", lambda actor=actor: _work(scheduler, cluster, actor, works))
    count = sum(actor.kind != "master" for actor in cluster.actors)
    _until(scheduler, cluster, lambda: len(works) == count, WORKS_S, "every client can put, read and remove")
    # A reservation ends, a fence that began before it does, and the one for it.
    limit_s = 4 * CONFIG.reservation_ttl_s
    _until(scheduler, cluster, lambda: _is_empty(cluster), limit_s, "all room is free")


def _check_ghosts(scheduler: Scheduler, cluster: Cluster) -> None:
    """What is said to exist can be read, or soon does not exist any more."""
    looked: dict[str, bool] = {}
    clients = [actor for actor in cluster.actors if actor.store is not None]
    for actor in clients:
        cluster.on(actor, "look", lambda actor=actor: _look(scheduler, actor, looked))
    _until(
        scheduler, cluster, lambda: len(looked) == len(clients), WORKS_S, "every key that exists can be read"
    )


def _look(scheduler: Scheduler, actor: Actor, looked: dict[str, bool]) -> None:
    left = [f"key-{number}" for number in range(KEYS)]
    while left:
        scheduler.block(scheduler.now_s + 0.2)
        left = [key for key in left if actor.store is not None and not _is_sound(actor.store, key)]
    looked[actor.name] = True


def _is_sound(store: Store, key: str) -> bool:
    try:
        if store.exist(key):
            store.get(key)
    except PASSING:
        return False
    return True


def _work(scheduler: Scheduler, cluster: Cluster, actor: Actor, works: dict[str, bool]) -> None:
    """Until a value of this client was put and read once, and all of its tenant are removed."""
    store = actor.store
    assert store is not None
    value = actor.name.encode()
    while actor.name not in works:
        try:
            if actor.kind == "owner":
                store.stop_draining()  # who was killed or cut off in the middle did not say it
            store.put(actor.name, value, if_exists="replace")
            if store.get(actor.name) != value:
                raise Violation(f"{actor.name} put one value and got another")
            store.remove_all()
            works[actor.name] = True
        except PASSING as error:
            scheduler.note(actor.name, type(error).__name__, str(error))
            scheduler.block(scheduler.now_s + 0.2)


def _is_empty(cluster: Cluster) -> bool:
    """Whether a leader has all room free, with every owner's segment, and nobody holds anything."""
    leaders = leading(cluster)
    if not leaders:
        return False
    for actor in cluster.actors:
        if actor.kind != "master" and actor.store is not None:
            cluster.on(actor, "remove", lambda actor=actor: _remove_all(actor))
    assert leaders[0].master is not None
    assert leaders[0].master.master is not None
    stats = leaders[0].master.master._state.stats()
    lent = sum(actor.lend_bytes for actor in cluster.actors)
    return (
        stats.capacity_bytes == stats.free_bytes == lent
        and stats.leases == stats.reservations == stats.retiring_bytes == stats.objects == 0
    )


def _remove_all(actor: Actor) -> None:
    if actor.store is not None:
        try:
            actor.store.remove_all()
        except errors.MasterUnreachable:
            return


def _until(scheduler: Scheduler, cluster: Cluster, over: object, limit_s: float, what: str) -> None:
    assert callable(over)
    end_s = scheduler.now_s + limit_s
    while not over():
        if scheduler.now_s >= end_s:
            raise Violation(f"not within {limit_s:g} s after everything was mended: {what}")
        scheduler.run(scheduler.now_s + LOOK_S)
        if scheduler.failures:
            return
        check_now(cluster, one_leader=True)
