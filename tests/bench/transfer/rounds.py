"""Measures by turns: in each round every contestant does the same operation and meets the same noise."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from contestant import Contestant, ContestantFailed
from transfer.cases import Operation

# Of a call: how long it took, the processor time of both sides, and how long their threads could have run but
# waited for a core.
KEYS = ("p50_us", "p99_us", "mean_us", "cpu_us", "core_wait_us")


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long to measure: rounds, and how long each contestant has in each.

    No round of an operation begins after ``limit_s``: some peers take seconds for a call on busy cores.
    """

    rounds: int
    window_s: float
    limit_s: float


@dataclasses.dataclass
class Findings:
    """Medians over the quieter rounds, per operation and contestant, and why some are missing."""

    medians: dict[tuple[Operation, str], dict[str, float]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)


def measure(
    operations: Mapping[Operation, Sequence[str]],
    contestants: Mapping[str, Contestant],
    pace: Pace,
    spinner_pids: Sequence[int],
    progress: Callable[[str], None],
) -> Findings:
    """Measure every operation with each contestant that takes part in it."""
    findings = Findings()
    for operation, names in operations.items():
        progress(str(operation))
        present = [name for name in names if name in contestants]
        rounds, last_start_s = [], time.monotonic() + pace.limit_s
        for number in range(pace.rounds):
            if rounds and time.monotonic() > last_start_s:
                break
            # Each round begins with another contestant: being first or after somebody is nobody's habit.
            turns = present[number % len(present) :] + present[: number % len(present)] if present else []
            rounds.append(_round(operation, turns, contestants, pace, spinner_pids, findings))
        for name in present:
            samples = [(noise, found[name]) for noise, found in rounds if name in found]
            if samples:
                findings.medians[operation, name] = _medians(samples)
    return findings


def _round(
    operation: Operation,
    turns: Iterable[str],
    contestants: Mapping[str, Contestant],
    pace: Pace,
    spinner_pids: Sequence[int],
    findings: Findings,
) -> tuple[float, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, float]] = {}
    noise = 0.0
    for name in turns:
        pids = [*contestants[name].pids, *spinner_pids]
        before, started_s = _others_s(pids), time.monotonic()
        waited_ns = _core_wait_ns(contestants[name].pids)
        try:
            found[name] = contestants[name].ask(
                "measure", **dataclasses.asdict(operation), seconds=pace.window_s
            )
            waited_ns = _core_wait_ns(contestants[name].pids) - waited_ns
            if calls := found[name].get("calls"):
                found[name]["core_wait_us"] = waited_ns / calls / 1e3
        except ContestantFailed as failure:
            findings.failures[name] = str(failure)
        noise = max(noise, (_others_s(pids) - before) / (time.monotonic() - started_s))
    return noise, found


def _medians(samples: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    quiet = sorted(samples, key=lambda sample: sample[0])[: max(3, (len(samples) + 1) // 2)]
    keys = [key for key in KEYS if all(key in found for _, found in quiet)]
    medians = {key: statistics.median(found[key] for _, found in quiet) for key in keys}
    return {**medians, "others": statistics.median(noise for noise, _ in quiet), "rounds": len(quiet)}


def _others_s(pids: Sequence[int]) -> float:
    """Processor time that everybody but these processes has used so far."""
    with open("/proc/stat") as file:
        user, nice, system = map(int, file.readline().split()[1:4])
    used = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        used += int(fields[11]) + int(fields[12])
    return (user + nice + system - used) / os.sysconf("SC_CLK_TCK")


def _core_wait_ns(pids: Sequence[int]) -> int:
    """What the threads of these processes have waited for a core so far, as their scheduler counts it."""
    waited = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                waited += int(file.read_text().split()[1])
    return waited
