"""One party of a benchmark, as the runner sees it: an agent that answers requests when it is its turn."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 180.0
EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Unavailable|Unreachable): ")


class ContestantFailed(Exception):
    """A party did not start, did not answer in time, or could not measure; the message says why."""


class Contestant:
    """A running agent. Requests go to its standard input, answers come from its standard output."""

    def __init__(self, name: str, argv: Sequence[str], stop_between_turns: bool) -> None:
        """Start it and wait until it has proved that it moves bytes. Raises ContestantFailed."""
        self.name = name
        self._stops = stop_between_turns
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self.pids: list[int] = []
        try:
            self.pids = self._answer(START_LIMIT_S)["pids"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send one request and return the answer. Raises ContestantFailed."""
        with self.turn():
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise ContestantFailed(f"{self.name} ended: {self._last_words()}") from None
            return self._answer(ANSWER_LIMIT_S)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run meanwhile. Some spin for ever, and would take the cores of those whose turn it is."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it with its children, which end with their parent."""
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        said, deadline_s = b"", time.monotonic() + limit_s
        while not said.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, _, _ = select.select([self._process.stdout], [], [], left_s)
            if not ready:
                raise ContestantFailed(
                    f"{self.name} did not answer within {limit_s:g} s: {self._last_words()}"
                )
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                raise ContestantFailed(f"{self.name} ended: {self._last_words()}")
            said += more
        answer: dict[str, Any] = json.loads(said)
        if "error" in answer:
            raise ContestantFailed(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        # The first exception is the cause: the target's comes before that of who waited for it.
        raised = [line for line in lines if EXCEPTION.match(line)]
        return next(iter(raised + lines[-1:]), "it said nothing")

    def _signal(self, number: int) -> None:
        for pid in self.pids if self._stops else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
