"""A whole cluster on this machine: started in order, watched, stopped in reverse order."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from mooncake_transformers.cluster._errors import ClusterError, ProcessDied, ProcessNotReady
from mooncake_transformers.cluster.argv import conductor_argv, master_argv, worker_argv
from mooncake_transformers.cluster.preflight import check_can_start
from mooncake_transformers.cluster.process import ChildProcess, ReadyMessage, wait_until_ready
from mooncake_transformers.cluster.progress import OnProgress, PartState, Progress, ignore_progress
from mooncake_transformers.cluster.restart import RestartBudget
from mooncake_transformers.cluster.spec import ClusterSpec

__all__ = ["Cluster", "Part"]

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.05


class Part:
    """One place in the cluster; when the process that holds it dies, the next one takes it."""

    def __init__(self, name: str, role: str, child: ChildProcess, budget: RestartBudget) -> None:
        self.name = name
        self.role = role
        self.child = child
        self.budget = budget
        self.endpoint = ""
        self.is_ready = False
        self.ready_by_s = 0.0
        self.restart_at_s: float | None = None

    @property
    def port(self) -> int:
        """The port it said it listens on; 0 before that."""
        # A master announces "host:port", the others a URL; urlsplit reads both once there is a "//".
        return urlsplit(self.endpoint if "//" in self.endpoint else f"//{self.endpoint}").port or 0


class Cluster:
    """Store master, workers and conductor as child processes of this one. A context manager.

    ``start`` returns when requests can be sent to ``url``. A process that dies later is started again at the
    same port, where the others find it; when one dies too often, ``failure`` is set and nothing is restarted
    any more. ``close`` leaves no process behind; should this process be killed, the
    children end by themselves. ``start`` and ``close`` belong to one thread; the rest may be read from any.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        on_progress: OnProgress = ignore_progress,
        stop: threading.Event | None = None,
        log_folder: Path | None = None,
    ) -> None:
        """Describe a cluster; nothing is started.

        Args:
            spec: what it consists of.
            on_progress: called for every step, also from the thread that watches the children.
            stop: setting it makes ``start`` stop what it has started and raise ClusterStopped.
            log_folder: where the processes' logs go and stay; None keeps them in files without a
                name, which no end of this process can leave behind.
        """
        self.spec = spec
        self.parts: list[Part] = []
        self.failure: ClusterError | None = None
        self._on_progress = on_progress
        self._stop = stop or threading.Event()
        self._log_folder = log_folder
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The gateway's URL, for example ``"http://127.0.0.1:8000"``."""
        return self.part("conductor").endpoint

    def part(self, name: str) -> Part:
        """The part called ``"store"``, ``"prefill-0"``, ``"decode-0"``, ``"conductor"``. Raises KeyError."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(f"no part is called {name!r}; there are {[part.name for part in self.parts]}")

    def __enter__(self) -> Cluster:
        """Start it, see ``start``."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Stop it, see ``close``."""
        self.close()

    def start(self) -> None:
        """Start everything and return when the gateway is ready.

        Raises SpecError, PortTaken, ProcessDied, ProcessNotReady, ClusterStopped; nothing runs then.
        """
        check_can_start(self.spec)
        if self._log_folder is not None:
            self._log_folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start_in_order()
        except BaseException:
            # Also for KeyboardInterrupt: no exception of any kind may leave children behind.
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="cluster-watcher", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stop every process, the last started first. Safe to call twice."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        workers = [part for part in self.parts if part.role in ("prefill", "decode")]
        for part in reversed(self.parts):
            if part in workers:
                # Workers end side by side: the first one's turn asks them all.
                for worker in workers:
                    worker.child.terminate()
            self._tell(part, "stopping")
            part.child.stop(self.spec.stop_timeout_s)
            self._tell(part, "stopped")
        self.parts = []

    def wait(self, stop: threading.Event) -> None:
        """Block until ``stop`` is set. Raises the cluster's failure when it fails first."""
        while not stop.wait(WATCH_INTERVAL_S):
            if self.failure is not None:
                raise self.failure

    # --- starting ---

    def _start_in_order(self) -> None:
        spec = self.spec
        self._spawn_and_wait([self._add("store", "store", master_argv(spec, port=0))])
        master = self.part("store").endpoint
        workers = [
            self._add(f"{role}-{index}", role, worker_argv(spec, role, master, port=0))
            for role, count in (("prefill", spec.prefill_workers), ("decode", spec.decode_workers))
            for index in range(count)
        ]
        self._spawn_and_wait(workers)
        urls = [worker.endpoint for worker in workers]
        self._spawn_and_wait([self._add("conductor", "conductor", conductor_argv(spec, urls, spec.port))])

    def _add(self, name: str, role: str, argv: list[str]) -> Part:
        log_path = None if self._log_folder is None else self._log_folder / f"{name}.log"
        child = ChildProcess(name, argv, log_path)
        part = Part(name, role, child, RestartBudget(self.spec.max_restarts_per_minute))
        self.parts.append(part)
        return part

    def _spawn_and_wait(self, parts: list[Part]) -> None:
        by_child = {part.child: part for part in parts}
        for part in parts:
            self._tell(part, "starting")
            part.child.spawn()
        wait_until_ready(
            list(by_child),
            self.spec.start_timeout_s,
            self._stop,
            lambda child, message: self._note_ready(by_child[child], message),
        )

    def _note_ready(self, part: Part, message: ReadyMessage) -> None:
        part.endpoint = str(message["url"] if "url" in message else message["address"])
        part.is_ready = True
        self._tell(part, "ready", part.endpoint)

    def _tell(self, part: Part, state: PartState, detail: str = "") -> None:
        self._on_progress(Progress(part=part.name, state=state, detail=detail))

    # --- watching, on a thread of its own ---

    def _watch(self) -> None:
        while self.failure is None and not self._closing.wait(WATCH_INTERVAL_S):
            for part in self.parts:
                try:
                    self._watch_part(part)
                except (ClusterError, OSError) as error:
                    log.info("the cluster has failed: %s", error)
                    self.failure = error if isinstance(error, ClusterError) else ClusterError(str(error))
                    break

    def _watch_part(self, part: Part) -> None:
        now_s = time.monotonic()
        if part.restart_at_s is not None:
            if now_s >= part.restart_at_s:
                self._respawn(part, now_s)
        elif part.child.exit_status is not None:
            self._note_death(part, part.child.death(), now_s)
        elif not part.is_ready:
            self._poll_restarted(part, now_s)

    def _note_death(self, part: Part, death: ProcessDied, now_s: float) -> None:
        part.is_ready = False
        self._tell(part, "died", str(death))
        delay_s = part.budget.delay_after_death(now_s)
        if not self.spec.restart or delay_s is None:
            raise death
        log.info("%s; starting it again in %.1f s", death, delay_s)
        part.child.stop(0)
        part.restart_at_s = now_s + delay_s

    def _respawn(self, part: Part, now_s: float) -> None:
        part.restart_at_s = None
        part.ready_by_s = now_s + self.spec.start_timeout_s
        self._tell(part, "starting")
        child = ChildProcess(part.name, self._argv_again(part), part.child.log_path)
        child.spawn()
        # Only now: whoever reads the part from another thread finds a child that has a process id.
        part.child = child

    def _argv_again(self, part: Part) -> list[str]:
        # At the port it had, where the others look for it.
        if part.role == "store":
            return master_argv(self.spec, part.port)
        if part.role == "conductor":
            urls = [other.endpoint for other in self.parts if other.role in ("prefill", "decode")]
            return conductor_argv(self.spec, urls, part.port)
        return worker_argv(self.spec, part.role, self.part("store").endpoint, part.port)

    def _poll_restarted(self, part: Part, now_s: float) -> None:
        try:
            message = part.child.poll_ready()
        except ProcessDied as death:
            self._note_death(part, death, now_s)
            return
        if message is not None:
            self._note_ready(part, message)
        elif now_s > part.ready_by_s:
            reason = f"not ready {self.spec.start_timeout_s:.0f} s after it was started again"
            raise ProcessNotReady(part.name, reason, part.child.log_tail())
