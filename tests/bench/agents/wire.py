"""What every agent of a benchmark shares: the line protocol with the runner, children, and the timing loop.

An agent is the initiator of one contestant, a process that the runner starts with the contestant's own
Python. It starts its target itself, then answers one JSON line per line. Standard library only, since it runs
in environments that are not ours.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
START_LIMIT_S = 60.0
WARM_CALLS = 2
LEAST_CALLS = 3


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_stdout() -> int:
    """Keep standard output for answers; what libraries print goes to standard error from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def say(answers: int, message: Mapping[str, Any]) -> None:
    """Write one line of JSON."""
    os.write(answers, json.dumps(message).encode() + b"\n")


def answer_requests(answers: int, handlers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """Answer requests ``{"do": name, ...}`` until standard input ends; a failure is an answer too."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("do")](**request)
        except Exception as error:  # the runner decides what a failed measurement means
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(answers, answer)


def start_target(argv: Sequence[str], pass_fds: Sequence[int] = ()) -> tuple[subprocess.Popen[bytes], Any]:
    """Start a child that says one line of JSON when it is ready; returns it with what it said."""
    child = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds, preexec_fn=die_with_parent
    )
    assert child.stdout is not None
    said, deadline_s = b"", time.monotonic() + START_LIMIT_S
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        more = os.read(child.stdout.fileno(), 1 << 16) if ready else b""
        if not more:
            child.kill()
            raise RuntimeError(f"the target did not start (exit status {child.wait(10)})")
        said += more
    return child, json.loads(said)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time these processes have used, in all their threads."""
    # The clock id of another process's CPU time, as clock_getcpuclockid(3) makes it.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def time_calls(call: Callable[[], int | None], seconds: float, pids: Sequence[int]) -> dict[str, Any]:
    """Call for about ``seconds``, and say how long calls took.

    ``call`` may return its own duration in nanoseconds, where its end was seen elsewhere.
    """
    clock = time.perf_counter_ns
    for _ in range(WARM_CALLS):
        call()
    taken: list[int] = []
    cpu_before_s = cpu_seconds(pids)
    now = clock()
    end = now + int(seconds * 1e9)
    while now < end or len(taken) < LEAST_CALLS:
        started = clock()
        own = call()
        now = clock()
        taken.append(now - started if own is None else own)
    return summary(taken, cpu_seconds(pids) - cpu_before_s)


def summary(taken_ns: list[int], cpu_s: float) -> dict[str, Any]:
    """Say how long calls took and what they cost both sides in processor time, per call."""
    taken = sorted(taken_ns)
    return {
        "calls": len(taken),
        "p50_us": taken[len(taken) // 2] / 1e3,
        "p99_us": taken[min(len(taken) - 1, len(taken) * 99 // 100)] / 1e3,
        "mean_us": sum(taken) / len(taken) / 1e3,
        "cpu_us": cpu_s / len(taken) * 1e6,
    }


def touched_memory(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map private memory and touch every page; returns it with its address."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, nbytes)
    return memory, address


def block_offsets(count: int, size: int) -> list[int]:
    """Where the blocks of a list lie: with a gap of their own size after each, so that none can be merged."""
    return [2 * index * size for index in range(count)]
