"""Runs probes of drivers in a process of their own: one that crashes or hangs takes down only itself."""

from __future__ import annotations

import inspect
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import IO

import msgspec

from mooncake_transfer.hooks import Available, DriverInfo, Unavailable

__all__ = ["Question", "probe_apart", "probe_here", "question", "serve"]

log = logging.getLogger(__name__)

PROBE_S = 10.0  # each probe
START_S = 60.0  # Python, which no probe is to blame for on a busy or emulated machine
END_S = 2.0

Verdict = Available | Unavailable

CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mooncake_transfer._probing import serve; serve()"
)


@dataclass(frozen=True, slots=True)
class Question:
    """Which driver to probe.

    Attributes:
        driver: its name.
        plugin: the entry point (``module:attribute``) of its plugin.
        options: the user's, as JSON; none for a probe that takes none, so that its answer holds for all.
    """

    driver: str
    plugin: str
    options: str = "{}"


def question(info: DriverInfo, plugin: str, options: Mapping[str, object]) -> Question:
    """Ask for a driver that its plugin describes as ``info``."""
    if not _takes_options(info.probe):
        return Question(info.name, plugin)
    text = msgspec.json.encode(options, order="sorted", enc_hook=str)  # what is no JSON, no driver takes
    return Question(info.name, plugin, text.decode())


def _takes_options(probe: Callable[..., object]) -> bool:
    try:
        return "options" in inspect.signature(probe).parameters
    except (TypeError, ValueError):  # of a compiled module that does not tell
        return False


class _Answer(msgspec.Struct):
    usable: bool
    devices: tuple[str, ...] = ()
    reason: str = ""


def probe_here(info: DriverInfo, options: Mapping[str, object]) -> Verdict:
    """Probe a driver in this process. Never raises, but does whatever else the probe does."""
    try:
        found: object = info.probe(options=options) if _takes_options(info.probe) else info.probe()
    except Exception as error:  # a third party's probe: its failure is the reason that is shown
        log.exception("probe of driver %s failed", info.name, extra={"driver": info.name})
        return Unavailable(f"its probe failed: {type(error).__name__}: {error}")
    if isinstance(found, Available | Unavailable):
        return found
    return Unavailable(f"its probe returned {found!r}, which is neither Available nor Unavailable")


def probe_apart(questions: Sequence[Question], *, limit_s: float = PROBE_S) -> dict[str, Verdict]:
    """Probe each driver in a child process, at most ``limit_s`` seconds each. Never raises."""
    verdicts: dict[str, Verdict] = {}
    while left := [question for question in questions if question.driver not in verdicts]:
        verdicts.update(_one_child(left, limit_s))
    return verdicts


def _one_child(questions: Sequence[Question], limit_s: float) -> dict[str, Verdict]:
    """Ask until one fails to answer; that one gets a verdict too, so there is always at least one."""
    command = [sys.executable, "-c", CHILD, json.dumps([path or "." for path in sys.path])]
    verdicts: dict[str, Verdict] = {}
    try:
        # In memory, not as arguments: options may be secret, and everyone sees those.
        with os.fdopen(os.memfd_create("mooncake-probe"), "w+b") as asked:
            asked.write(msgspec.json.encode(questions))
            asked.seek(0)
            child = subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        reason = f"its probe needs a process of its own, and {sys.executable!r} does not start: {error}"
        return {question.driver: Unavailable(reason) for question in questions}
    assert child.stdout is not None
    with child.stdout as answers:
        try:
            started = _read_line(answers, time.monotonic() + START_S) is not None
            for question in questions:
                line = _read_line(answers, time.monotonic() + limit_s) if started else None
                if line is None:
                    verdicts[question.driver] = Unavailable(_why(child, limit_s if started else START_S))
                    break
                verdicts[question.driver] = _parse(line)
        finally:
            stuck = not _killed(child)
    if stuck:
        log.warning("process %d, which probed drivers, cannot be killed", child.pid)
        last = list(verdicts)[-1]
        if isinstance(verdict := verdicts[last], Unavailable):
            verdicts[last] = Unavailable(
                f"{verdict.reason}; its probe cannot be killed (process {child.pid})"
            )
    return verdicts


def _killed(child: subprocess.Popen[bytes]) -> bool:
    """End it; False when it is still there, as one that hangs in the kernel is for as long as that takes."""
    child.kill()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read_line(stream: IO[bytes], deadline_s: float) -> bytes | None:
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                return None
            more = os.read(stream.fileno(), 1)
            if not more:
                return None
            line += more
    return line


def _parse(line: bytes) -> Verdict:
    try:
        answer = msgspec.json.decode(line, type=_Answer)
    except msgspec.MsgspecError as error:
        return Unavailable(f"the answer of its probe is garbled: {error}")
    return Available(answer.devices) if answer.usable else Unavailable(answer.reason)


def _why(child: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        status = child.wait(END_S if _ended(child) else 0)
    except subprocess.TimeoutExpired:
        return f"its probe did not answer within {limit_s:g} s"
    if status < 0:
        return f"its probe crashed: {signal.Signals(-status).name}"
    return f"its probe ended the process with status {status}"


def _ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether its pipe is closed, which it is shortly before its status can be fetched."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return bool(selector.select(0))


def _forget_crash_handlers() -> None:
    """Undo what libraries of drivers probed before have done: some catch crashes, and leave with a status."""
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)


def serve() -> None:
    """The child: an empty line, then a line of JSON for each question in the JSON on its standard input."""
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    # Libraries that print must not garble the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    answers.write(b"\n")  # it has started
    for asked in questions:
        answers.write(msgspec.json.encode(_answer(asked)) + b"\n")


def _answer(asked: Question) -> _Answer:
    try:
        _forget_crash_handlers()
        found = probe_here(_described(asked.driver, asked.plugin), msgspec.json.decode(asked.options))
    except Exception as error:  # noqa: BLE001 - a third party's code: its failure is the answer
        return _Answer(False, reason=f"its plugin failed: {type(error).__name__}: {error}")
    if isinstance(found, Available):
        return _Answer(True, devices=tuple(map(str, found.devices)))
    return _Answer(False, reason=str(found.reason))


def _described(driver: str, plugin: str) -> DriverInfo:
    described = EntryPoint(driver, plugin, "mooncake_transfer.drivers").load().mooncake_transfer_drivers()
    for info in described:
        if isinstance(info, DriverInfo) and info.name == driver:
            return info
    raise LookupError(f"plugin {plugin} describes no driver {driver!r} any more")
