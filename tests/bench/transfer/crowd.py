"""Many peers and threads at once for a while: errors, growth of memory, and how evenly they are served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rows import VALUE, Row, Target
from spinners import IDLE
from transfer.contestants import AGENTS

PEERS, THREADS_PER_PEER = 64, 4
START_S = 120.0
MIB = 1 << 20
# What threads still touch of their stacks for the first time: four pages each. That nothing is left over by
# operation is a test of the package, with many more of them for each thread.
GROWTH_MIB = PEERS * THREADS_PER_PEER * 4 * 4096 / MIB


def crowd_rows(wanted: Callable[[str], bool], seconds: float, progress: Callable[[str], None]) -> list[Row]:
    """Run the crowd and judge it: no error, no growth of memory, peers served within a factor of two."""
    what = f"crowd: {PEERS} peers x {THREADS_PER_PEER} threads over tcp, mixed sizes, {seconds:g} s"
    if not wanted(what):
        return []
    progress(what)
    command = [sys.executable, str(AGENTS / "crowd.py"), "--peers", str(PEERS)]
    command += ["--threads", str(THREADS_PER_PEER), "--seconds", str(seconds)]
    found, details = dict[str, Any](), dict[str, object]()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds + START_S)
        found = json.loads(ended.stdout)
        details = {
            "condition": IDLE,
            "first_error": found["first_error"],
            "gb_per_s": found["bytes"] / seconds / 1e9,
            "samples": found["samples"],  # operations, and bytes of memory by then
        }
    except subprocess.TimeoutExpired:
        details["absent"] = f"the crowd did not end within {seconds + START_S:g} s"
    except ValueError:
        lines = ended.stderr.strip().splitlines() or ["it said nothing"]
        details["absent"] = f"the crowd failed: {lines[-1]}"
    judged = (
        ("errors", "errors", found.get("errors"), 0.0),
        ("growth of memory in its second half", "MiB", _growth_mib(found.get("samples", [])), GROWTH_MIB),
        ("most served over least served peer", "x bytes", found.get("unfairness"), 2.0),
    )
    return [
        Row("transfer", f"{what}: {name}", unit, value, target=Target(VALUE, at_most=limit), details=details)
        for name, unit, value, limit in judged
    ]


def _growth_mib(samples: list[tuple[int, int]]) -> float | None:
    """Growth over the second half of the run: of the median memory, from its first quarter to its second."""
    quarter = len(samples) // 4
    if quarter == 0:
        return None
    memory = [resident for _, resident in samples]
    early, late = sorted(memory[2 * quarter : 3 * quarter]), sorted(memory[-quarter:])
    return (late[quarter // 2] - early[quarter // 2]) / MIB
