"""One supervised child process: it says when it is ready, dies with its parent and never outlives a stop."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from mooncake_transformers.cluster._errors import ClusterStopped, ProcessDied, ProcessNotReady
from mooncake_transformers.cluster.last_words import last_words

__all__ = ["ChildProcess", "ReadyMessage", "wait_until_ready"]

ReadyMessage = dict[str, object]

KILL_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 16384
LOG_TAIL_LINES = 30


class ChildProcess:
    """A process started with ``--ready-fd`` and ``--lifeline-fd``, its output in a log file: one at
    ``log_path``, or, where that is None, one without a name, whose bytes live as long as the processes do.

    It runs in a session of its own, so a Ctrl-C in the terminal reaches the parent alone, which then stops
    its children in order. It holds the read end of a pipe whose write end only this process has: the kernel
    closes that end when this process dies, however it dies. Not thread-safe.
    """

    def __init__(self, name: str, argv: Sequence[str], log_path: Path | None) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log_path = log_path
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd: int | None = None
        self._lifeline_fd: int | None = None
        self._ready_bytes = b""

    @property
    def pid(self) -> int:
        """The process's id. Only after ``spawn``."""
        assert self._process is not None, f"{self.name} was not spawned"
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs or was never spawned; else its exit status, or minus the signal's number."""
        return None if self._process is None else self._process.poll()

    def spawn(self) -> None:
        """Start the process. Returns at once; raises OSError when it cannot be started."""
        assert self._process is None, f"{self.name} was spawned before"
        ready_read, ready_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        self._ready_fd, self._lifeline_fd = ready_read, lifeline_write
        os.set_blocking(ready_read, False)
        try:
            self._log = self._open_log()
            self._process = subprocess.Popen(
                [*self.argv, "--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(ready_write, lifeline_read),
                start_new_session=True,
            )
        finally:
            os.close(ready_write)
            os.close(lifeline_read)
            if self._process is None:
                self._close_files()

    def fileno(self) -> int:
        """The ready pipe's descriptor, so that a selector can wait on the child."""
        assert self._ready_fd is not None, f"{self.name} has said that it is ready, or was stopped"
        return self._ready_fd

    def poll_ready(self) -> ReadyMessage | None:
        """Return what the child said when it became ready, or None when it has not yet. Never blocks.

        Raises ProcessDied when it ended, or closed its ready pipe, instead.
        """
        assert self._ready_fd is not None, f"{self.name} was not spawned, is ready already, or was stopped"
        try:
            chunk = os.read(self._ready_fd, 65536)
        except BlockingIOError:
            return None
        self._ready_bytes += chunk
        if chunk and not self._ready_bytes.endswith(b"\n"):
            return None
        os.close(self._ready_fd)
        self._ready_fd = None
        if not self._ready_bytes.endswith(b"\n"):
            raise self.death()
        return msgspec.json.decode(self._ready_bytes, type=ReadyMessage)

    def death(self) -> ProcessDied:
        """The error that tells how the child ended, in its own last words."""
        status = self._await_exit(KILL_TIMEOUT_S)
        tail = self.log_tail()
        ended = "closed its ready pipe but runs on" if status is None else _describe_exit(status)
        # What a killed process logged last has nothing to do with its end.
        reason = "" if status is not None and status < 0 else last_words(tail)
        return ProcessDied(self.name, f"{reason} ({ended})" if reason else ended, tail)

    def log_tail(self) -> list[str]:
        """The last lines of its log, oldest first. Only between ``spawn`` and ``stop``; none outside."""
        if self._log is None:
            return []
        # Not by seeking: the child writes at the position of the very same open file.
        start = max(0, os.fstat(self._log.fileno()).st_size - LOG_TAIL_BYTES)
        text = os.pread(self._log.fileno(), LOG_TAIL_BYTES, start).decode(errors="replace")
        return text.splitlines()[-LOG_TAIL_LINES:]

    def terminate(self) -> None:
        """Ask it to end (SIGTERM). Returns at once; a child that is gone already is fine."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Ask it to end, wait up to ``grace_s`` seconds, then kill it. Safe to call twice.

        When this returns the process is gone, and whatever else it had started has been killed.
        """
        if self._process is None:
            return
        self.terminate()
        if self._await_exit(grace_s) is None:
            self._process.kill()
            self._process.wait(KILL_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._close_files()

    def _open_log(self) -> IO[bytes]:
        # Open as long as the child: what it logs is read back from here.
        if self.log_path is None:
            return tempfile.TemporaryFile()
        return open(self.log_path, "a+b")

    def _await_exit(self, timeout_s: float) -> int | None:
        assert self._process is not None, f"{self.name} was not spawned"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _close_files(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        for fd in (self._ready_fd, self._lifeline_fd):
            if fd is not None:
                os.close(fd)
        self._ready_fd = self._lifeline_fd = None


def wait_until_ready(
    children: Sequence[ChildProcess],
    timeout_s: float,
    stop: threading.Event,
    on_ready: Callable[[ChildProcess, ReadyMessage], None],
) -> None:
    """Wait until every child has said that it is ready; call ``on_ready`` as each one does.

    Raises ProcessDied for the first that ends, ProcessNotReady at the deadline, ClusterStopped at ``stop``.
    """
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.fileno(), selectors.EVENT_READ, child)
        while selector.get_map():
            if stop.is_set():
                raise ClusterStopped("asked to stop while the cluster was starting")
            if time.monotonic() > deadline_s:
                late: ChildProcess = next(iter(selector.get_map().values())).data
                message = f"not ready after {timeout_s:.0f} s; its log has the reason, or give it more time"
                raise ProcessNotReady(late.name, message, late.log_tail())
            for key, _ in selector.select(POLL_INTERVAL_S):
                child = key.data
                selector.unregister(key.fd)
                message_or_none = child.poll_ready()
                if message_or_none is None:
                    selector.register(key.fd, selectors.EVENT_READ, child)
                else:
                    on_ready(child, message_or_none)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}"
