"""Commands of ``mooncake store`` as processes of a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType

__all__ = ["StoreProcess"]

END_TIMEOUT_S = 30.0


class StoreProcess:
    """A command of ``mooncake store`` that runs until it is told to end, or this process does.

    Attributes:
        process: to send it signals.
        ready: what it said when it was ready; empty when it ended instead, as was expected.
    """

    def __init__(self, *arguments: str, starts: bool = True) -> None:
        """Run it and wait until it is ready.

        ``starts`` False: it is expected to end instead. Raises AssertionError, with what it said, when one
        that should start has ended.
        """
        ready, ready_end = os.pipe()
        lifeline_end, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "mooncake_transfer.cli", "store", *arguments]
        command += ["--ready-fd", str(ready_end), "--lifeline-fd", str(lifeline_end)]
        # A file, because nobody reads meanwhile: a full pipe would hold it up.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(command, pass_fds=(ready_end, lifeline_end), stderr=self._said)
        os.close(ready_end)
        os.close(lifeline_end)
        with os.fdopen(ready) as pipe:
            self.ready: dict[str, str] = json.loads(pipe.read() or "{}")
        if starts and not self.ready:
            status, said = self.wait()
            raise AssertionError(f"mooncake store {arguments[0]} ended with status {status}: {said}")

    @property
    def address(self) -> str:
        """Of its engine."""
        return self.ready["address"]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send it a signal; its exit status, and what it said."""
        self.process.send_signal(number)
        return self.wait()

    def let_go(self) -> None:
        """Have its lifeline broken, as if this process had died."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def wait(self) -> tuple[int, str]:
        """Wait for its end; its exit status, and what it said."""
        try:
            status = self.process.wait(END_TIMEOUT_S)
            return status, self.said()
        finally:
            self.close()

    def said(self) -> str:
        """What it has said until now."""
        held = self._said.fileno()
        # Without the file's offset, which is also the process's own.
        return os.pread(held, os.fstat(held).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """End it at once, if it has not; may be called again."""
        self.let_go()
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)
        self._said.close()

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
