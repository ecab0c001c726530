"""What else the cores do while a benchmark runs: nothing, stay awake, or be busy with other work."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

IDLE, AWAKE, BUSY = "idle", "awake", "busy"
CONDITIONS = (IDLE, AWAKE, BUSY)

SPIN = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # end with the parent
if sys.argv[1] == "awake":
    # Runs only where nobody else wants to: the core never sleeps, and never makes anyone wait.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("spinning", flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def cores(condition: str) -> Iterator[list[int]]:
    """Hold all cores in a condition meanwhile; gives the pids of the processes that spin."""
    assert condition in CONDITIONS, condition
    count = 0 if condition == IDLE else len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", SPIN, condition]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait(10)
            assert child.stdout is not None
            child.stdout.close()
