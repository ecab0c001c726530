"""``mooncake serve`` as a child process of a test, with everything it starts accounted for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

__all__ = ["MOONCAKE", "ServedCluster", "run_mooncake", "wait_until"]

MOONCAKE = (sys.executable, "-m", "mooncake_transfer.cli")
SHARED_MEMORY = Path("/dev/shm")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.02


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Poll ``condition`` until it is true; return the seconds that took. AssertionError at the deadline."""
    began_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_INTERVAL_S)
    return time.monotonic() - began_s


def run_mooncake(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a ``mooncake`` command to its end and return status and output."""
    return subprocess.run(
        [*MOONCAKE, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


class ServedCluster:
    """A running ``mooncake serve``. A context manager that ends with a check that nothing is left.

    Attributes:
        model: the model's folder. It must be this cluster's alone: processes are found by it.
        url: the gateway's URL, once ready.
    """

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        """Describe it.

        Args:
            model: folder of the model.
            folder: where its log and its ready file go.
            options: further options of ``mooncake serve``.
        """
        self.model = model
        self.url = ""
        self._ready_file = folder / "ready.json"
        self._log_file = folder / "serve.log"
        self._temporary = folder / "temporary"
        self._options = options
        self._process: psutil.Popen | None = None
        self._family: dict[int, psutil.Process] = {}
        self._shared_memory_before: set[str] = set()

    def __enter__(self) -> ServedCluster:
        """Start it and wait until it is ready."""
        self.spawn()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it with Ctrl-C and check that no process and no shared memory is left."""
        if self.is_running:
            status = self.interrupt()
            assert status == 0, f"serve ended with status {status} after Ctrl-C:\n{self.log()}"
        self.check_nothing_is_left()

    @property
    def is_running(self) -> bool:
        """Whether ``mooncake serve`` itself runs."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start it without waiting."""
        self._shared_memory_before = _shared_memory()
        argv = [*MOONCAKE, "serve", "--port", "0", "--model", str(self.model), *self._options]
        # A folder of its own for temporary files, so that nobody else's are taken for what it left.
        self._temporary.mkdir(exist_ok=True)
        argv = ["env", f"TMPDIR={self._temporary}", *argv]
        with open(self._log_file, "wb") as log:
            self._process = psutil.Popen(
                [*argv, "--json-ready", str(self._ready_file)], stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> None:
        """Wait until requests can be sent. AssertionError with the log when it ends instead."""
        wait_until(
            lambda: self._ready_file.exists() or not self.is_running, "serve is ready", START_TIMEOUT_S
        )
        assert self.is_running, f"serve ended before it was ready:\n{self.log()}"
        self.url = self.ready_message()["url"]
        self.family()

    def ready_message(self) -> dict[str, Any]:
        """What ``--json-ready`` wrote."""
        return msgspec.json.decode(self._ready_file.read_bytes(), type=dict[str, Any])

    def log(self) -> str:
        """What it has printed so far."""
        return self._log_file.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Every process it has started and that still runs, found now or earlier."""
        if self.is_running:
            assert self._process is not None
            for child in self._process.children(recursive=True):
                self._family[child.pid] = child
        return [child for child in self._family.values() if _runs(child)]

    def child(self, *words: str) -> psutil.Process:
        """The running child whose command line has all ``words``, for example ``"--role", "decode"``."""
        found = [child for child in self.family() if set(words) <= set(_command_line(child))]
        assert len(found) == 1, f"{len(found)} processes have {words} in their command line"
        return found[0]

    def interrupt(self) -> int:
        """Press Ctrl-C, wait for the end, and return the exit status."""
        return self.end_with(signal.SIGINT)

    def kill(self) -> None:
        """Kill it (SIGKILL), which it cannot notice."""
        self.end_with(signal.SIGKILL)

    def end_with(self, signum: signal.Signals) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        assert self._process is not None, "it was never started"
        self.family()
        self._process.send_signal(signum)
        return int(self._process.wait(STOP_TIMEOUT_S))

    def check_nothing_is_left(self, timeout_s: float = 10.0) -> None:
        """Wait until no process and no shared-memory or temporary file of it is left, or AssertionError."""
        wait_until(lambda: not self._left_processes(), "every process has ended", timeout_s)
        wait_until(
            lambda: not _shared_memory() - self._shared_memory_before,
            "every file in /dev/shm is gone",
            timeout_s,
        )
        left = [entry.name for entry in self._temporary.iterdir()] if self._temporary.is_dir() else []
        assert left == [], f"temporary files are left: {left}"

    def _left_processes(self) -> list[psutil.Process]:
        # By name too: a worker started after the last look is nobody's child when serve has been killed.
        named = [one for one in psutil.process_iter() if str(self.model) in _command_line(one)]
        return [one for one in [*self._family.values(), *named] if _runs(one)]


def _runs(process: psutil.Process) -> bool:
    # Where nobody reaps orphans a zombie stays; it holds nothing any more.
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _shared_memory() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
