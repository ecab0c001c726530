"""What the store's modules get in place of ``threading``, ``time``, ``secrets`` and ``random``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, cast

from simulated.scheduler import Process, Scheduler, Task

__all__ = ["Condition", "Event", "random_of", "secrets_of", "threading_of", "time_of"]


class _Waiters:
    """Tasks that wait for one thing, first come first served."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tasks: deque[Task] = deque()

    def wait(self, until_s: float | None) -> bool:
        task = self._scheduler.here()
        self._tasks.append(task)
        woken = self._scheduler.block(until_s)
        if not woken and task in self._tasks:
            self._tasks.remove(task)
        return woken

    def wake(self, count: int) -> None:
        while self._tasks and count:
            self._scheduler.wake(self._tasks.popleft())
            count -= 1

    def wake_all(self) -> None:
        self.wake(len(self._tasks))


class Lock:
    """threading.Lock, and RLock with ``again``."""

    def __init__(self, scheduler: Scheduler, *, again: bool) -> None:
        self._scheduler = scheduler
        self._again = again
        self._owner: Task | None = None
        self._depth = 0
        self._waiters = _Waiters(scheduler)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler.here()
        if self._again and self._owner is task:
            self._depth += 1
            return True
        self._scheduler.interrupt()
        until_s = None if timeout < 0 else self._scheduler.true_s(timeout)
        while self._owner is not None:
            if not blocking or (until_s is not None and self._scheduler.now_s >= until_s):
                return False
            self._waiters.wait(until_s)
        self._owner, self._depth = task, 1
        return True

    def release(self) -> None:
        task = self._scheduler.current
        if task is None or task.process.dead:
            return
        assert self._owner is not None, "release of a lock that nobody holds"
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._waiters.wake(1)

    def locked(self) -> bool:
        return self._owner is not None

    def _let_go(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        self._waiters.wake(1)
        return depth

    def _take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Condition:
    """threading.Condition."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or Lock(scheduler, again=True)
        self._waiters = _Waiters(scheduler)
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        until_s = None if timeout is None else self._scheduler.true_s(timeout)
        return self._wait(until_s)

    def _wait(self, until_s: float | None) -> bool:
        depth = self._lock._let_go()
        woken = self._waiters.wait(until_s)
        self._lock._take_back(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until_s = None if timeout is None else self._scheduler.true_s(timeout)
        while not (found := predicate()):
            if until_s is not None and self._scheduler.now_s >= until_s:
                break
            self._wait(until_s)
        return found

    def notify(self, n: int = 1) -> None:
        self._scheduler.here()
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._scheduler.here()
        self._waiters.wake_all()


class Event:
    """threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiters = _Waiters(scheduler)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._scheduler.here()
        self._set = True
        self._waiters.wake_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until_s = None if timeout is None else self._scheduler.true_s(timeout)
        while not self._set:
            if until_s is not None and self._scheduler.now_s >= until_s:
                break
            self._waiters.wait(until_s)
        return self._set


class Thread:
    """threading.Thread of the process that starts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._target, self._args = target, args
        self.name, self.daemon = name, daemon
        self.ident: int | None = None
        self._over = Event(scheduler)

    def start(self) -> None:
        process: Process = self._scheduler.here().process
        self.ident = id(self)
        self._scheduler.spawn(process, f"{process.name} {self.name}", self._run).thread = self

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            task = self._scheduler.current
            if task is not None and not task.process.dead:
                self._over.set()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)

    def is_alive(self) -> bool:
        return self.ident is not None and not self._over.is_set()


def threading_of(scheduler: Scheduler) -> SimpleNamespace:
    """``threading``."""

    def current_thread() -> Thread:
        task = scheduler.here()
        if task.thread is None:
            task.thread = Thread(scheduler, lambda: None)
        return cast(Thread, task.thread)

    return SimpleNamespace(
        Lock=lambda: Lock(scheduler, again=False),
        RLock=lambda: Lock(scheduler, again=True),
        Condition=lambda lock=None: Condition(scheduler, lock),
        Event=lambda: Event(scheduler),
        Thread=lambda **options: Thread(scheduler, **options),
        current_thread=current_thread,
        TIMEOUT_MAX=threading.TIMEOUT_MAX,
    )


def time_of(scheduler: Scheduler) -> SimpleNamespace:
    """``time``."""

    def clock_gettime(clock: int) -> float:
        assert clock == time.CLOCK_BOOTTIME, f"no process reads clock {clock}"
        return scheduler.boottime_s()

    return SimpleNamespace(
        monotonic=scheduler.monotonic_s,
        time=scheduler.wall_s,
        clock_gettime=clock_gettime,
        CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
        sleep=lambda seconds: scheduler.block(scheduler.true_s(seconds)),
    )


def secrets_of(scheduler: Scheduler) -> SimpleNamespace:
    """``secrets``."""
    return SimpleNamespace(
        randbits=scheduler.random.getrandbits,
        token_bytes=scheduler.random.randbytes,
        token_hex=lambda nbytes: scheduler.random.randbytes(nbytes).hex(),
    )


def random_of(scheduler: Scheduler) -> SimpleNamespace:
    """``random``."""
    return SimpleNamespace(uniform=scheduler.random.uniform, random=scheduler.random.random)
