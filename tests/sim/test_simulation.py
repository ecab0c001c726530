"""Simulated stores keep their promises whatever goes wrong; broken ones: `hatch run sim --mutations`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULTS = 10_000


def test_no_promise_is_broken_by_ten_thousand_faults() -> None:
    from simulated.run import run_seed

    faults: Counter[str] = Counter()
    ordered = reads = 0
    for seed in range(1000):
        outcome = run_seed(seed)
        assert not outcome.failure, f"seed {seed}: {outcome.failure}; again: hatch run sim --seed {seed}"
        faults += outcome.faults
        ordered, reads = ordered + outcome.ordered, reads + outcome.reads
        if faults.total() >= FAULTS and min(faults.values()) >= 3:
            break
    # It means something only if all of this really happens in it.
    assert faults.total() >= FAULTS
    assert min(faults.values()) >= 3, faults
    assert reads > 1000
    assert ordered > 500


def test_a_seed_is_the_same_run_again_in_another_process() -> None:
    from simulated.run import run_seed

    command = [sys.executable, str(HERE), "--seed", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        here = run_seed(3)
        said, _ = other.communicate(timeout=100)
    assert other.returncode == 0
    assert f"trace {here.trace:08x} every promise was kept" in said


def test_no_simulated_module_reaches_a_real_clock_or_thread() -> None:
    from simulated.substitution import escapes, simulated_modules

    modules = simulated_modules()
    assert len(modules) > 40
    assert [escape for module in modules for escape in escapes(module)] == []
