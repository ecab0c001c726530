"""Masters, owners and clients of one simulated store, each a process that can be killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mooncake_store import Store, StoreConfig, errors
from mooncake_store.cluster.master import ClusterMaster
from mooncake_store.policy import TenantPolicy
from mooncake_store.tiers.config import TierConfig
from mooncake_transfer.errors import TransferError
from simulated.coordination import Service, SimCoordination
from simulated.disk import Disk
from simulated.engine import SimEngine
from simulated.history import History, Violation
from simulated.network import Network
from simulated.rare import RareLoad
from simulated.scheduler import Machine, Process, Scheduler

__all__ = ["CONFIG", "QUOTA_BYTES", "Actor", "Cluster"]

QUOTA_BYTES = 48 << 10
TIER_BYTES, BUCKET_BYTES = 512 << 10, 64 << 10
# A fifth of the default times.
CONFIG = StoreConfig(
    lease_ttl_s=2.0,
    reservation_ttl_s=6.0,
    client_ttl_s=6.0,
    leader_ttl_s=1.0,
    heartbeat_s=0.2,
    reconnect_max_s=0.2,
    connect_timeout_s=0.6,
    call_timeout_s=1.0,
    transfer_timeout_s=2.0,
    put_wait_s=0.4,
    notice_wait_s=0.2,
    staging_bytes=16 << 10,
    recovery=True,
    tier_admission="all",
    tier_staging_bytes=128 << 10,
    tier_write_timeout_s=1.0,
    tenants={"limited": TenantPolicy(quota_bytes=QUOTA_BYTES, eviction="own")},
)
# No call may take longer, but for the time in which its own process was stopped. The longest: a put that is
# tried three times, each of which reserves, moves and commits, and joins a master again before.
CALL_LIMIT_S = 30.0
MASTERS, OWNERS, CLIENTS = 3, 2, 2
LOADS = {"owner": 1, "client": 2}


@dataclass(eq=False)
class Actor:
    """A master, an owner or a client, through all of its lives.

    Attributes:
        process: of the present life; None while it is away.
    """

    kind: str
    name: str
    machine: Machine
    tenant: str = ""
    lend_bytes: int = 0
    lives: int = 0
    process: Process | None = None
    engine: SimEngine | None = None
    master: ClusterMaster | None = None
    store: Store | None = None
    load: list[RareLoad] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    """A call that has not ended."""

    what: str
    process: Process
    began_s: float
    paused_s: float


class Cluster:
    """All of it.

    Attributes:
        histories: of each tenant.
        load_over: clients finish what they do, and begin nothing more.
        drained_s: when a drain last ended; inf: one may be under way.
    """

    def __init__(self, scheduler: Scheduler, folder: Path) -> None:
        chance = scheduler.random
        self.scheduler = scheduler
        self.network = Network(scheduler)
        self.service = Service(self.network)
        self.histories = {"": History(), "limited": History()}
        self.load_over = False
        self.drained_s = float("-inf")
        self.calls_ended = 0
        self._calls: list[_Call] = []
        self.actors: list[Actor] = []
        for number in range(MASTERS):
            self.actors.append(Actor("master", f"master-{number}", self._machine(f"m{number}")))
        owners = [self._machine(f"o{number}") for number in range(OWNERS)]
        for number, machine in enumerate(owners):
            machine.disk = Disk(scheduler, folder / machine.name)
            lent = 4096 * chance.randint(8, 24)
            tenant = "" if number else "limited"
            self.actors.append(Actor("owner", f"owner-{number}", machine, tenant, lent))
        for number in range(CLIENTS):
            # One shares its machine with an owner.
            machine = owners[0] if number == 0 else self._machine(f"c{number}")
            tenant = "limited" if number else ""
            self.actors.append(Actor("client", f"client-{number}", machine, tenant))

    def _machine(self, name: str) -> Machine:
        chance = self.scheduler.random
        return Machine(name, rate=chance.uniform(0.98, 1.02), booted_s=chance.uniform(0, 1e6))

    def open_coordination(self, url: str, timeout_s: float) -> SimCoordination:
        """As ``mooncake_store.cluster.open_coordination``."""
        return SimCoordination(self.service)

    # ---- lives

    def start(self, actor: Actor) -> None:
        """Begin a life of a process that is away, on a machine that is up."""
        if actor.process is not None or not actor.machine.up:
            return
        actor.lives += 1
        process = Process(f"{actor.name}.{actor.lives}", actor.machine)
        actor.machine.processes.append(process)
        actor.process = process
        actor.engine = SimEngine(self.network, process, f"{actor.name}:{7000 + actor.lives}")
        work = self._lead if actor.kind == "master" else self._join
        self.scheduler.note("start", process.name)
        self.scheduler.spawn(process, f"{process.name} main", partial(work, actor))

    def kill(self, actor: Actor, *, silent: bool = False) -> None:
        """End its life; ``silent``: as a machine that loses power."""
        process, engine = actor.process, actor.engine
        if process is None or engine is None:
            return
        self.scheduler.note("kill", process.name, silent)
        self._calls = [call for call in self._calls if call.process is not process]
        self.scheduler.kill(process)
        self.network.on_death(engine, silent=silent)
        actor.process = actor.engine = actor.master = actor.store = None
        actor.load = []

    def _lead(self, actor: Actor) -> None:
        assert actor.engine is not None
        actor.master = ClusterMaster(actor.engine, "sim:cluster", CONFIG)

    def _join(self, actor: Actor) -> None:
        engine, process = actor.engine, actor.process
        assert engine is not None
        assert process is not None
        settings = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}
        if actor.kind == "owner":
            settings["tiers"] = (self._tier(actor.machine),)
        config = StoreConfig(**{**settings, "tenant": actor.tenant})
        while actor.store is None:
            try:
                with self.watched("join"):
                    actor.store = Store(engine, "sim:cluster", lend_bytes=actor.lend_bytes, config=config)
            except (errors.MasterError, errors.TierError, TransferError) as error:
                self.scheduler.note("no master", type(error).__name__)
                self.scheduler.block(self.scheduler.now_s + 0.1)
        for number in range(LOADS[actor.kind]):
            load = RareLoad(self, actor.store, self.histories[actor.tenant])
            actor.load.append(load)
            self.scheduler.spawn(process, f"{process.name} load {number}", load.run)

    @staticmethod
    def _tier(machine: Machine) -> TierConfig:
        assert isinstance(machine.disk, Disk)
        path = str(machine.disk.folder / "tier")
        return TierConfig(kind="file", path=path, capacity_bytes=TIER_BYTES, bucket_bytes=BUCKET_BYTES)

    def close(self, actor: Actor) -> None:
        """End its life as SIGTERM does: it leaves the store in order."""
        process = actor.process
        if process is None or process.paused:
            return

        def leave() -> None:
            with self.watched("close"):
                for closed in (actor.store, actor.master):
                    if closed is not None:
                        closed.close()
            self.scheduler.after(0.0, partial(self._ended, actor, process))

        self.scheduler.note("close", process.name)
        self.scheduler.spawn(process, f"{process.name} close", leave)

    def _ended(self, actor: Actor, process: Process) -> None:
        if actor.process is process:
            self.kill(actor)

    # ---- calls

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """A call that has to end."""
        process = self.scheduler.here().process
        call = _Call(f"{process.name} {what}", process, self.scheduler.now_s, process.paused_s)
        self._calls.append(call)
        try:
            yield
        finally:
            if call in self._calls:
                self._calls.remove(call)
            self.calls_ended += 1

    def check_calls(self) -> None:
        """Raises Violation for a call that does not end."""
        for call in self._calls:
            if call.process.paused or call.process.dead:
                continue
            took_s = self.scheduler.now_s - call.began_s - (call.process.paused_s - call.paused_s)
            if took_s > CALL_LIMIT_S:
                raise Violation(f"{call.what} of {call.began_s:.3f} has not ended after {took_s:.1f} s")

    @property
    def busy(self) -> bool:
        """Whether calls have not ended."""
        return bool(self._calls)

    def on_loss(self) -> None:
        """A master, or the standing of an owner, was lost, or may be soon."""
        for history in self.histories.values():
            history.loss_s = self.scheduler.now_s

    def on(self, actor: Actor, name: str, work: Callable[[], None]) -> None:
        """Have a thread of a process do something."""
        if actor.process is not None:
            self.scheduler.spawn(actor.process, f"{actor.process.name} {name}", work)
