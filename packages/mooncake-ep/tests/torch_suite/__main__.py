"""``hatch run torch-suite``: torch's own DistributedTest, which ships in its wheel, under our backend.

Every test that is live for gloo on CPUs runs; what gloo does not pass either on this machine is not counted
against us. Ranks are forked from one process that has imported torch. `--write FILE` writes the list.
"""

from __future__ import annotations

import argparse
import collections
import io
import multiprocessing
import os
import re
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LIMIT_S = 120.0
GOES_ON = "gloo raises when a rank is late; here it is evicted and the others go on"
GLOO_ONLY = "torch has monitored_barrier for gloo alone"
DIFFERS = {
    "test_barrier_timeout_full_group": GOES_ON,
    "test_barrier_timeout_group": GOES_ON,
    "test_monitored_barrier_failure_order": GLOO_ONLY,
    "test_monitored_barrier_gloo": GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": GLOO_ONLY,
    "test_monitored_barrier_gloo_subgroup": GLOO_ONLY,
    "test_monitored_barrier_wait_all_ranks": GLOO_ONLY,
    "test_sparse_all_reduce_sum": "sparse tensors are not there",
}
ERROR = re.compile(r"[\w.]+(Error|Exception|Failed|Evicted|Timeout|Mismatch): ")
GLOO, OURS = "gloo", "mooncake"


class TreatedAsGloo(str):
    """A backend's name that torch's tests take for gloo's where they ask what to do with gloo."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == GLOO  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(GLOO)


def suite(backend: str, world: int, folder: str) -> type[unittest.TestCase]:
    """Import the tests as for gloo, so that those for gloo are live, and have them use another backend."""
    os.environ.update(BACKEND=GLOO, WORLD_SIZE=str(world), TEMP_DIR=folder)
    from torch.testing._internal.distributed import distributed_test

    import mooncake_ep.pg  # noqa: F401 - registers the backend

    distributed_test.BACKEND = TreatedAsGloo(backend)
    # With less than 8 ranks torch skips tests of groups, except where it sees this.
    os.environ["BACKEND"] = "mpi"
    for feature in ("ddp", "subgroup"):
        distributed_test.DistTestCases.backend_feature[feature].add(backend)

    tests: Any = distributed_test.DistributedTest._DistTestBase

    class TestOurs(distributed_test.TestDistBackend, tests):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return TestOurs


def run_one(backend: str, world: int, name: str, answer: Any) -> None:
    """Run one test in this process, which has nothing else to do, and tell how it went."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kind = suite(backend, world, folder)
        result = unittest.TestResult()
        said = io.StringIO()
        sys.stdout = sys.stderr = said
        kind(name).run(result)
        if result.skipped:
            answer.send(("skipped", result.skipped[0][1]))
        elif result.wasSuccessful():
            answer.send(("passed", ""))
        else:
            text = (result.errors + result.failures)[0][1]
            answer.send(("failed", cause(text) + "\n" + text))


def cause(text: str) -> str:
    """Return the line of a traceback that says most: the first exception of a rank."""
    lines = [line for line in text.splitlines() if ERROR.match(line) and "exited with error" not in line]
    return (lines or text.strip().splitlines())[0][:200]


def outcome(backend: str, world: int, name: str) -> tuple[str, str]:
    """Run one test in a process of its own, with a limit."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_one, args=(backend, world, name, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT_S):
            return "failed", f"not over after {LIMIT_S:g} s"
        found: tuple[str, str] = receiver.recv()
        return found
    except EOFError:
        return "failed", "its process ended"
    finally:
        process.join(5)
        process.kill()


def names(world: int) -> list[str]:
    """Return the tests of torch's class. Imports it, so that processes forked later need not."""
    kind = suite(OURS, world, tempfile.gettempdir())
    return [name for name in dir(kind) if name.startswith("test_")]


def results(wanted: list[str], world: int, compare: bool) -> Iterator[tuple[str, str, str]]:
    """Run each test; give its name, how it ended, and why."""
    for name in wanted:
        ours, why = outcome(OURS, world, name)
        if ours == "failed" and name in DIFFERS:
            ours, why = "differs", DIFFERS[name]
        elif ours == "failed" and compare:
            theirs, reason = outcome(GLOO, world, name)
            if theirs != "passed":
                ours, why = "not applicable", f"gloo: {theirs}, {reason.splitlines()[0] if reason else ''}"
        elif ours == "skipped":
            ours = "not applicable"
        yield name, ours, why


def page(found: list[tuple[str, str, str]], world: int) -> str:
    """Write the list as Markdown."""
    lines = [
        f"# torch {torch.__version__.partition('+')[0]}'s DistributedTest under the backend `mooncake`",
        "",
        f"Written by `hatch run torch-suite --write FILE`; {world} ranks on CPUs.",
        "Not applicable: skipped without GPUs or for want of a package, or not passed by gloo here either.",
    ]
    for kind in ("failed", "differs", "passed", "not applicable"):
        these = [(name, why) for name, how, why in found if how == kind]
        lines += ["", f"## {kind.capitalize()}: {len(these)}"]
        for name, why in these:
            reason = why.splitlines()[0] if why else ""
            lines.append(f"- `{name}`" + (f": {reason}" if reason else ""))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the suite; the exit status is 1 if anything failed that gloo passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="names; none: all")
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--alone", action="store_true", help="do not run with gloo what fails")
    parser.add_argument("--verbose", action="store_true", help="the whole text of failures")
    options = parser.parse_args()
    found = []
    every = names(options.world)
    for name, how, why in results(options.tests or every, options.world, not options.alone):
        found.append((name, how, why))
        text = why if options.verbose else why.splitlines()[0] if why else ""
        sys.stdout.write(f"{how:14} {name} {text}\n")
        sys.stdout.flush()
    if options.write:
        options.write.write_text(page(found, options.world))
    kinds = collections.Counter(how for _, how, _ in found)
    failed = kinds["failed"]
    rest = f", {kinds['differs']} differ" if kinds["differs"] else ""
    text = f"{kinds['passed']} passed, {failed} failed, {kinds['not applicable']} not applicable{rest}\n"
    sys.stdout.write(text)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
