"""What must hold of a simulated store at any time."""

from __future__ import annotations

from simulated.cluster import Actor, Cluster
from simulated.history import Violation

__all__ = ["check_now", "leading"]

TWICE_S = 10.0


def leading(cluster: Cluster) -> list[Actor]:
    """The masters that may answer now."""
    found = []
    for actor in cluster.actors:
        master, process = actor.master, actor.process
        if master is None or process is None or master.master is None:
            continue
        term = master._candidate._term
        boottime_s = actor.machine.booted_s + cluster.scheduler.now_s * actor.machine.rate
        if term is not None and term.leader.epoch == master.master.epoch and boottime_s < term.until_s:
            found.append(actor)
    return found


def check_now(cluster: Cluster, *, one_leader: bool) -> None:
    """Raises Violation."""
    cluster.check_calls()
    leaders = leading(cluster)
    if one_leader and len(leaders) > 1:
        raise Violation(f"{[leader.name for leader in leaders]} lead at the same time")
    for leader in leaders:
        _check_books(leader)
        # What leaves a segment is there twice for a while, whatever the quota.
        if cluster.scheduler.now_s - cluster.drained_s > TWICE_S:
            _check_quotas(leader)


def _check_books(leader: Actor) -> None:
    assert leader.master is not None
    master = leader.master.master
    if master is None:
        return
    state = master._state
    stats = state.stats()
    room = state.context.map.room()
    if min(room) < 0 or stats.capacity_bytes != stats.used_bytes + stats.reserved_bytes + stats.free_bytes:
        raise Violation(f"{leader.name} books room that does not add up: {room}, {stats}")
    taken: dict[tuple[int, int], int] = {}
    granule = state.config.granule_bytes
    for version, _, _, _, _, _, _, extents in state.context.map.describe():
        for segment, offset, nbytes, _ in extents:
            for number in range(offset // granule, -(-(offset + nbytes) // granule)):
                other = taken.setdefault((segment, number), version)
                if other != version:
                    where = f"granule {number} of segment {segment:x}"
                    raise Violation(f"{leader.name} has given {where} to versions {other} and {version}")


def _check_quotas(leader: Actor) -> None:
    assert leader.master is not None
    master = leader.master.master
    for tenant in master._state.report(0, 0.0).tenants if master is not None else ():
        quota = tenant.quota_bytes
        if tenant.used_bytes < 0 or (quota is not None and tenant.used_bytes > quota):
            raise Violation(f"tenant {tenant.tenant!r} uses {tenant.used_bytes} bytes of {quota}")
