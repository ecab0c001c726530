"""What goes wrong in a simulated store, and how often it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from simulated.cluster import Actor, Cluster
from simulated.disk import Disk
from simulated.network import Partition
from simulated.scheduler import Process

__all__ = ["KINDS", "PAUSES", "Faults"]

# One thread or one connection is late for a moment: what happens on any busy machine.
PAUSES = frozenset({"thread late", "connection late"})
KINDS = PAUSES | {
    "connection cut",
    "transfer failed",
    "process killed",
    "process ended",
    "process stopped",
    "writer stopped",
    "machine lost",
    "machine suspended",
    "network parted",
    "direction lost",
    "coordination away",
    "coordination lossy",
    "coordination forgot",
    "coordination answer lost",
    "wall clock stepped",
    "bit flipped",
    "file cut short",
    "foreign file left",
    "disk failed",
    "disk slow",
    "disk full",
}

MEAN_PAUSE_S = 0.01
SHORT_S, LONG_S = 0.8, 8.0
LONG = 0.15
WRITER_S = 16.0
LATE_S = 0.15  # of one connection or thread


class Faults:
    """Injects faults at random times until it is told to stop, and then mends what can be mended.

    Attributes:
        counts: of each kind.
        forgot: when the coordination service last lost what it knew: two may lead for a term then.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self.counts: Counter[str] = Counter()
        self.stopped = False
        self.forgot_s = -1e9
        self._partitions: list[Partition] = []
        # Of what takes something away for a while: some stores have little of it, and so more to lose.
        heavy = self._scheduler.random.choice([0.1, 0.3, 1.0])
        light: list[tuple[Callable[[], None], float]] = [
            (self.connection_cut, 100),
            (self.connection_late, 250),
            (self.transfer_failed, 300),
            (self.thread_late, 250),
        ]
        rest: list[tuple[Callable[[], None], float]] = [
            (self.process_killed, 4),
            (self.process_ended, 2),
            (self.process_stopped, 8),
            (self.writer_stopped, 30),
            (self.machine_lost, 1),
            (self.machine_suspended, 1),
            (self.network_parted, 4),
            (self.direction_lost, 4),
            (self.coordination_away, 2),
            (self.coordination_lossy, 2),
            (self.coordination_forgot, 1),
            (self.wall_clock_stepped, 4),
        ]
        rest += [
            (self.bit_flipped, 6),
            (self.file_cut_short, 2),
            (self.foreign_file_left, 2),
            (self.disk_failed, 4),
            (self.disk_slow, 4),
            (self.disk_full, 2),
        ]
        self._kinds = light + [(kind, heavy * weight) for kind, weight in rest]

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total() + self._cluster.service.faults

    def begin(self) -> None:
        """Inject from now on."""
        self._scheduler.after(self._scheduler.random.expovariate(1 / MEAN_PAUSE_S), self._inject)

    def _inject(self) -> None:
        if self.stopped:
            return
        kinds, weights = zip(*self._kinds, strict=True)
        (kind,) = self._scheduler.random.choices(kinds, weights)
        kind()
        self.begin()

    def stop(self) -> None:
        """No more; what is away comes back, what is parted is joined."""
        self.stopped = True
        for partition in list(self._partitions):
            self._heal(partition)
        self._cluster.service.available, self._cluster.service.lossy = True, 0.0
        self._cluster.network.failing, self._cluster.network.stop_writer = 0, None
        for actor in self._cluster.actors:
            if isinstance(actor.machine.disk, Disk):
                actor.machine.disk.full = False
            actor.machine.up = True
            self._resume(actor)
            self._cluster.start(actor)

    def _note(self, kind: str, *what: object) -> None:
        assert kind in KINDS
        self.counts[kind] += 1
        self._scheduler.note(kind, *what)

    def _any(self) -> Actor | None:
        alive = [actor for actor in self._cluster.actors if actor.process is not None]
        return self._scheduler.random.choice(alive) if alive else None

    def _for_s(self) -> float:
        chance = self._scheduler.random
        return chance.uniform(0.01, LONG_S if chance.random() < LONG else SHORT_S)

    # ---- processes and machines

    def process_killed(self) -> None:
        if (actor := self._any()) is not None:
            self._note("process killed", actor.name)
            self._kill(actor, silent=False)

    def _kill(self, actor: Actor, *, silent: bool) -> None:
        self._cluster.kill(actor, silent=silent)
        self._scheduler.after(self._for_s(), partial(self._cluster.start, actor))

    def process_ended(self) -> None:
        if (actor := self._any()) is not None:
            self._note("process ended", actor.name)
            self._cluster.close(actor)
            # A close that takes too long is killed; either way it is started again.
            self._scheduler.after(self._for_s() + 3.0, partial(self._again, actor, actor.process))

    def _again(self, actor: Actor, process: object) -> None:
        if actor.process is process:
            self._cluster.kill(actor)
        self._cluster.start(actor)

    def process_stopped(self) -> None:
        actor = self._any()
        if actor is None or actor.process is None or actor.process.paused:
            return
        self._note("process stopped", actor.name)
        self._pause(actor)
        self._scheduler.after(self._for_s(), partial(self._resume, actor))

    def writer_stopped(self) -> None:
        """In the middle of a copy into memory of another process of its machine, often until after the end of
        its reservation.
        """
        if self._cluster.network.stop_writer is None:
            self._cluster.network.stop_writer = self._stop_writer

    def _stop_writer(self, process: Process) -> None:
        (actor,) = (actor for actor in self._cluster.actors if actor.process is process)
        self._note("writer stopped", actor.name)
        self._pause(actor)
        self._scheduler.after(self._scheduler.random.uniform(0.01, WRITER_S), partial(self._resume, actor))

    def _pause(self, actor: Actor) -> None:
        process = actor.process
        if process is not None and not process.paused:
            self._scheduler.pause(process)
            process.stopped_s = self._scheduler.now_s
            self._cluster.network.on_pause(process)

    def _resume(self, actor: Actor) -> None:
        process = actor.process
        if process is not None and process.paused:
            process.paused_s += self._scheduler.now_s - process.stopped_s
            self._scheduler.resume(process)

    def thread_late(self) -> None:
        """One thread of a process gets no processor for a while; the others do."""
        if (actor := self._any()) is not None and actor.process is not None and actor.process.tasks:
            task = self._scheduler.random.choice(actor.process.tasks)
            self._note("thread late", task.name)
            task.not_before_s = self._scheduler.now_s + self._scheduler.random.uniform(0, LATE_S)

    def machine_lost(self) -> None:
        chosen = self._any()
        if chosen is None:
            return
        machine = chosen.machine
        self._note("machine lost", machine.name)
        for actor in self._cluster.actors:
            if actor.machine is machine:
                self._kill(actor, silent=True)
        machine.up = False
        if isinstance(machine.disk, Disk):
            machine.disk.lose_power()
        self._scheduler.after(self._for_s(), partial(self._boot, chosen))

    def _boot(self, chosen: Actor) -> None:
        chosen.machine.up = True
        for actor in self._cluster.actors:
            if actor.machine is chosen.machine:
                self._cluster.start(actor)

    def machine_suspended(self) -> None:
        chosen = self._any()
        if chosen is None or any(process.paused for process in chosen.machine.processes):
            return
        self._note("machine suspended", chosen.machine.name)
        here = [actor for actor in self._cluster.actors if actor.machine is chosen.machine]
        for actor in here:
            self._pause(actor)
        self._scheduler.after(self._for_s(), partial(self._wake, here, self._scheduler.now_s))

    def _wake(self, here: list[Actor], since_s: float) -> None:
        here[0].machine.slept_s += self._scheduler.now_s - since_s
        for actor in here:
            self._resume(actor)

    def wall_clock_stepped(self) -> None:
        if (actor := self._any()) is not None:
            self._note("wall clock stepped", actor.machine.name)
            actor.machine.wall_s += self._scheduler.random.choice(
                [-1, 1]
            ) * 10 ** self._scheduler.random.uniform(-1, 6)

    # ---- the network

    def connection_cut(self) -> None:
        network = self._cluster.network
        if network.connections:
            connection = self._scheduler.random.choice(network.connections)
            self._note("connection cut", connection.number)
            network.cut(connection, 0.2)

    def connection_late(self) -> None:
        """Nothing arrives over it for a moment."""
        network = self._cluster.network
        if network.connections:
            connection = self._scheduler.random.choice(network.connections)
            self._note("connection late", connection.number)
            until_s = self._scheduler.now_s + self._scheduler.random.uniform(0, LATE_S)
            connection.arrives_s = [max(arrives_s, until_s) for arrives_s in connection.arrives_s]

    def transfer_failed(self) -> None:
        """One of those under way, or the next one."""
        network = self._cluster.network
        if network.failing < 2:
            self._note("transfer failed")
            network.failing += 1

    def network_parted(self) -> None:
        """One machine, from some or all others."""
        machines = self._machines()
        alone = self._scheduler.random.choice(machines)
        others = [name for name in machines if name != alone]
        others = self._scheduler.random.sample(others, self._scheduler.random.randint(1, len(others)))
        self._part({pair for other in others for pair in ((alone, other), (other, alone))}, "network parted")

    def direction_lost(self) -> None:
        """Of two machines, only one reaches the other."""
        source, target = self._scheduler.random.sample(self._machines(), 2)
        self._part({(source, target)}, "direction lost")

    def _machines(self) -> list[str]:
        names = dict.fromkeys(actor.machine.name for actor in self._cluster.actors)
        return [*names, self._cluster.service.process.machine.name]

    def _part(self, pairs: set[tuple[str, str]], kind: str) -> None:
        partition = Partition(pairs)
        self._note(kind, sorted(pairs))
        self._partitions.append(partition)
        self._cluster.network.part(partition)
        self._scheduler.after(self._for_s(), partial(self._heal, partition))

    def _heal(self, partition: Partition) -> None:
        if not partition.over:
            self._partitions.remove(partition)
            self._cluster.network.heal(partition)

    # ---- disks

    def _disk(self) -> Disk:
        machines = dict.fromkeys(actor.machine for actor in self._cluster.actors)
        disks = [machine.disk for machine in machines if isinstance(machine.disk, Disk)]
        return self._scheduler.random.choice(disks)

    def bit_flipped(self) -> None:
        if self._disk().flip():
            self._note("bit flipped")

    def file_cut_short(self) -> None:
        if self._disk().cut_short():
            self._note("file cut short")

    def foreign_file_left(self) -> None:
        if self._disk().leave_foreign():
            self._note("foreign file left")

    def disk_failed(self) -> None:
        """Of the next operation."""
        self._note("disk failed")
        self._disk().failing = 1

    def disk_slow(self) -> None:
        """The next operation."""
        self._note("disk slow")
        self._disk().slow = 1

    def disk_full(self) -> None:
        disk = self._disk()
        self._note("disk full")
        disk.full = True
        self._scheduler.after(self._for_s(), partial(self._disk_has_room, disk))

    @staticmethod
    def _disk_has_room(disk: Disk) -> None:
        disk.full = False

    # ---- the coordination service

    def coordination_away(self) -> None:
        self._note("coordination away")
        self._cluster.service.available = False
        self._scheduler.after(self._for_s(), self._coordination_back)

    def _coordination_back(self) -> None:
        self._cluster.service.available = True

    def coordination_lossy(self) -> None:
        self._note("coordination lossy")
        self._cluster.service.lossy = 0.3
        self._scheduler.after(self._for_s(), self._coordination_whole)

    def _coordination_whole(self) -> None:
        self._cluster.service.lossy = 0.0

    def coordination_forgot(self) -> None:
        self._note("coordination forgot")
        self._cluster.service.forget()
        self.forgot_s = self._scheduler.now_s
