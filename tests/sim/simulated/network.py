"""Connections between engines: ordered within each, late, cut, or silent for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from simulated.scheduler import Process, Scheduler

if TYPE_CHECKING:
    from simulated.engine import SimEngine

__all__ = ["Connection", "Network", "Partition"]

# Of a partition or a stopped process, until a connection is taken for dead: a fifth of the default, as all
# times of the simulated stores are.
SILENCE_S = 3.0
USUAL_DELAY_S, LATE_DELAY_S = 500e-6, 0.3
LATE = 0.01


@dataclass(eq=False)
class Connection:
    """From the engine that asked for it to the one that answers."""

    number: int
    client: SimEngine
    server: SimEngine
    # Of each direction (from the client, from the server): when the last message arrives, and what is held.
    arrives_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    held: list[deque[Callable[[], None]]] = field(default_factory=lambda: [deque(), deque()])
    cut: bool = False
    client_knows: bool = False
    server_knows: bool = False

    def ends(self, direction: int) -> tuple[Process, Process]:
        """Who sends and who gets."""
        both = self.client.process, self.server.process
        return both if direction == 0 else (both[1], both[0])


@dataclass(eq=False)
class Partition:
    """Machines that get nothing from others, as long as it is in force."""

    pairs: set[tuple[str, str]]
    over: bool = False


class Network:
    """All engines, by address, and what is between them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.engines: dict[str, SimEngine] = {}
        self.connections: list[Connection] = []
        self.partitions: list[Partition] = []
        self.failing = 0  # transfers that are going to fail
        # Stops the process that writes next to memory of its own machine, which is in the middle of a copy.
        self.stop_writer: Callable[[Process], None] | None = None
        self._numbers = 0

    # ---- who reaches whom

    def blocked(self, source: Process, target: Process) -> bool:
        """Whether nothing gets from one to the other now."""
        pair = (source.machine.name, target.machine.name)
        return any(pair in partition.pairs for partition in self.partitions)

    def latency_s(self) -> float:
        """Of one message."""
        chance = self.scheduler.random
        return chance.uniform(0, LATE_DELAY_S if chance.random() < LATE else USUAL_DELAY_S)

    # ---- messages

    def open(self, client: SimEngine, server: SimEngine) -> Connection:
        """A new connection."""
        self._numbers += 1
        connection = Connection(self._numbers, client, server)
        self.connections.append(connection)
        return connection

    def send(self, connection: Connection, direction: int, deliver: Callable[[], None]) -> None:
        """Have a message arrive after all that were sent before it, or never."""
        if connection.cut:
            return
        now_s = self.scheduler.now_s
        arrives_s = max(now_s + self.latency_s(), connection.arrives_s[direction] + 1e-9)
        connection.arrives_s[direction] = arrives_s
        self.scheduler.after(arrives_s - now_s, partial(self._arrive, connection, direction, deliver))

    def _arrive(self, connection: Connection, direction: int, deliver: Callable[[], None]) -> None:
        source, target = connection.ends(direction)
        if connection.cut or target.dead:
            return
        if connection.held[direction] or self.blocked(source, target):
            connection.held[direction].append(deliver)
        else:
            deliver()

    def _release(self, connection: Connection) -> None:
        for direction in (0, 1):
            if self.blocked(*connection.ends(direction)):
                continue
            held, connection.held[direction] = connection.held[direction], deque()
            for deliver in held:
                self.send(connection, direction, deliver)

    # ---- losses

    def cut(self, connection: Connection, within_s: float = 1e-3) -> None:
        """End a connection; each side learns of it in its own time. What is on its way is lost."""
        if connection.cut:
            return
        connection.cut = True
        self.connections.remove(connection)
        for side in (connection.client, connection.server):
            delay_s = self.scheduler.random.uniform(0, within_s)
            self.scheduler.after(delay_s, partial(self._tell, connection, side))

    def _tell(self, connection: Connection, side: SimEngine) -> None:
        process = side.process
        if process.dead:
            return
        if process.paused:
            process.waiting.append(partial(self._tell, connection, side))
        else:
            side.lost(connection)

    def part(self, partition: Partition) -> None:
        """Put a partition in force; connections across it are taken for dead when it lasts."""
        self.partitions.append(partition)
        for connection in list(self.connections):
            pairs = {self._machines(connection), self._machines(connection)[::-1]}
            if pairs & partition.pairs:
                self._watch(connection, lambda: partition.over)

    def heal(self, partition: Partition) -> None:
        """End it."""
        partition.over = True
        self.partitions.remove(partition)
        for connection in list(self.connections):
            self._release(connection)

    def on_pause(self, process: Process) -> None:
        """Its peers hear nothing of it."""
        before_s = process.paused_s
        for connection in list(self.connections):
            if process in connection.ends(0):
                self._watch(connection, lambda: not process.paused or process.paused_s > before_s)

    def _watch(self, connection: Connection, over: Callable[[], bool]) -> None:
        def look() -> None:
            if not over():
                self.cut(connection, SILENCE_S / 10)

        self.scheduler.after(SILENCE_S * self.scheduler.random.uniform(1, 1.3), look)

    def on_death(self, engine: SimEngine, *, silent: bool) -> None:
        """The kernel closes what a killed process had open; a machine that lost power closes nothing."""
        self.engines.pop(engine.address, None)
        for connection in list(self.connections):
            if engine in (connection.client, connection.server):
                self.cut(connection, SILENCE_S * 1.3 if silent else 1e-3)

    @staticmethod
    def _machines(connection: Connection) -> tuple[str, str]:
        source, target = connection.ends(0)
        return source.machine.name, target.machine.name
