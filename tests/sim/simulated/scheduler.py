"""Virtual time, and tasks that run one at a time in an order that the seed decides."""

from __future__ import annotations

import heapq
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import greenlet

__all__ = ["Killed", "Machine", "Process", "Scheduler", "Task"]

# How long a task that may run waits for a processor: mostly nothing, now and then a time slice.
USUAL_WAIT_S, SLICE_S = 20e-6, 4e-3
SLICES = 0.01
SWITCHES = 0.1  # of the points at which a thread may be interrupted


class Killed(BaseException):
    """Ends the tasks of a process that was killed; nothing catches it."""


@dataclass(eq=False)
class Machine:
    """Clocks that its processes share, and what survives them.

    Attributes:
        rate: its seconds by true ones.
        slept_s: true seconds in which it was suspended; only the lease clock counts them.
        wall_s: the wall clock less the true time. Steps.
    """

    name: str
    rate: float = 1.0
    booted_s: float = 0.0
    slept_s: float = 0.0
    wall_s: float = 1.7e9
    up: bool = True
    disk: object = None  # where its tiers lie, if it has any
    processes: list[Process] = field(default_factory=list)


@dataclass(eq=False)
class Process:
    """What is killed, and stopped, as one."""

    name: str
    machine: Machine
    dead: bool = False
    paused: bool = False
    paused_s: float = 0.0  # in all
    stopped_s: float = 0.0  # when it was stopped last
    tasks: list[Task] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)  # for the end of a pause
    on_death: list[Callable[[], None]] = field(default_factory=list)


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, name: str, run: Callable[[bool], None], parent: Any) -> None:
        self.process = process
        self.name = name
        self.greenlet = greenlet.greenlet(run, parent)
        self.turn = 0  # which of its waits this is
        self.done = False
        self.not_before_s = 0.0  # when it gets a processor again
        self.thread: object = None  # what current_thread() gives
        self.on_done: list[Callable[[], None]] = []


class Scheduler:
    """Runs events in the order of their times, and of chance where these are equal.

    Attributes:
        now_s: true time, which no process knows.
        current: the task that runs.
        trace: a checksum of everything that has happened in its order.
        failures: exceptions that no task may end with.
        notes: what is added to the trace, where somebody wants to read it.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 100.0
        self.current: Task | None = None
        self.trace = 0
        self.failures: list[tuple[str, BaseException]] = []
        self.events = 0
        self.notes: deque[tuple[float, tuple[object, ...]]] | None = None
        self._heap: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._hub = greenlet.getcurrent()

    # ---- events

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have something happen."""
        entry = (self.now_s + delay_s, self.random.random(), next(self._numbers), call)
        heapq.heappush(self._heap, entry)

    def note(self, *what: object) -> None:
        """Add something to the trace."""
        self.trace = zlib.crc32(repr((self.now_s, what)).encode(), self.trace)
        if self.notes is not None:
            self.notes.append((self.now_s, what))

    def run(self, until_s: float, over: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen up to a time, or until it is over."""
        while self._heap and self._heap[0][0] <= until_s and not self.failures and not over():
            when_s, _, _, call = heapq.heappop(self._heap)
            self.now_s = max(self.now_s, when_s)
            self.events += 1
            call()
        if not self.failures and not over():
            self.now_s = max(self.now_s, until_s)

    # ---- tasks

    def spawn(self, process: Process, name: str, work: Callable[[], None]) -> Task:
        """Start a thread of a process."""
        task = Task(process, name, lambda _: self._work(task, work), self._hub)
        process.tasks.append(task)
        self.after(self._wait_s(), partial(self._go_on, task, task.turn, True))
        return task

    def _work(self, task: Task, work: Callable[[], None]) -> None:
        try:
            work()
        except Killed:
            pass
        except BaseException as error:
            self.failures.append((task.name, error))
        task.done = True
        task.process.tasks.remove(task)
        for call in task.on_done:
            call()

    def _go_on(self, task: Task, turn: int, woken: bool) -> None:
        if task.done or task.turn != turn:
            return
        if task.process.paused and not task.process.dead:
            task.process.waiting.append(partial(self._go_on, task, turn, woken))
            return
        if task.not_before_s > self.now_s:
            self.after(task.not_before_s - self.now_s, partial(self._go_on, task, turn, woken))
            return
        self.note(task.name, woken)
        self.current = task
        try:
            task.greenlet.switch(woken)
        finally:
            self.current = None

    def block(self, until_s: float | None = None) -> bool:
        """Let others run until this task is woken (True) or it is ``until_s`` of true time."""
        task = self.here()
        task.turn += 1
        if until_s is not None:
            self.after(max(0.0, until_s - self.now_s), partial(self._go_on, task, task.turn, False))
        woken: bool = self._hub.switch()
        if task.process.dead:
            raise Killed
        return woken

    def wake(self, task: Task) -> None:
        """Let a task that blocks go on."""
        self.after(self._wait_s(), partial(self._go_on, task, task.turn, True))

    def interrupt(self) -> None:
        """A point at which another thread may get the processor."""
        if self.random.random() < SWITCHES:
            self.block(self.now_s + self._wait_s())

    def here(self) -> Task:
        """The task that runs. Raises Killed when its process is dead."""
        task = self.current
        assert task is not None, "only tasks of a process do this"
        if task.process.dead:
            raise Killed
        return task

    def _wait_s(self) -> float:
        if self.random.random() < SLICES:
            return self.random.uniform(0, SLICE_S)
        return self.random.uniform(0, USUAL_WAIT_S)

    # ---- processes

    def kill(self, process: Process) -> None:
        """End a process at once: none of its code runs any more."""
        if process.dead:
            return
        process.dead = True
        process.machine.processes.remove(process)
        for call in process.on_death:
            call()
        self.bury(process)

    def bury(self, process: Process) -> None:
        """Unwind what is left of its tasks. They have no effect on anything that lives."""
        for task in list(process.tasks):
            if task is not self.current and not task.done:
                self.current = task
                task.turn += 1
                task.greenlet.throw(Killed) if task.greenlet else self._never_ran(task)
                self.current = None
        process.waiting.clear()

    @staticmethod
    def _never_ran(task: Task) -> None:
        task.done = True
        task.process.tasks.remove(task)

    def pause(self, process: Process) -> None:
        """As SIGSTOP."""
        process.paused = True

    def resume(self, process: Process) -> None:
        """As SIGCONT."""
        process.paused = False
        waiting, process.waiting = process.waiting, []
        for call in waiting:
            self.after(self._wait_s(), call)

    # ---- clocks of the machine of the current task

    def monotonic_s(self) -> float:
        """CLOCK_MONOTONIC."""
        machine = self.here().process.machine
        return machine.booted_s + (self.now_s - machine.slept_s) * machine.rate

    def boottime_s(self) -> float:
        """CLOCK_BOOTTIME."""
        machine = self.here().process.machine
        return machine.booted_s + self.now_s * machine.rate

    def wall_s(self) -> float:
        """CLOCK_REALTIME."""
        return self.now_s + self.here().process.machine.wall_s

    def true_s(self, seconds: float) -> float:
        """When so many seconds of this machine will have passed."""
        return self.now_s + max(0.0, seconds) / self.here().process.machine.rate
