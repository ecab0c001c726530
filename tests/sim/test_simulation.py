"""Simulated stores keep their promises whatever goes wrong; broken ones: `hatch run sim --mutations`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULTS = 10_000  # those that are more than a short pause
FEW_SEEDS = 20


def test_no_promise_is_broken_by_ten_thousand_faults() -> None:
    from simulated.faults import KINDS, PAUSES
    from simulated.run import run_seed

    faults: Counter[str] = Counter()
    ordered = reads = 0
    for seed in range(1000):
        outcome = run_seed(seed)
        assert not outcome.failure, f"seed {seed}: {outcome.failure}; again: hatch run sim --seed {seed}"
        faults += outcome.faults
        ordered, reads = ordered + outcome.ordered, reads + outcome.reads
        heavy = sum(count for kind, count in faults.items() if kind not in PAUSES)
        if heavy >= FAULTS and min(faults[kind] for kind in KINDS) >= 3:
            break
    # It means something only if all of this really happens in it.
    assert heavy >= FAULTS
    assert min(faults[kind] for kind in KINDS) >= 3, faults
    assert reads > 1000
    assert ordered > 500


def test_a_mistake_in_the_store_is_found() -> None:
    from mutations import first_to_find

    found = first_to_find("what_is_replaced_stays_in_tiers", range(FEW_SEEDS))
    assert found is not None
    assert "which had been replaced or removed" in found.failure


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
