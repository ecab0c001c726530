"""``hatch run faults [LAYER] [PYTEST ARGUMENTS]``: what goes wrong on purpose, of one layer or of all.

Real processes, servers and files. Everything else is ``hatch run sim``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EP = "packages/mooncake-ep/tests/pg"
STORE, TRANSFER = "packages/mooncake-store/tests", "packages/mooncake-transfer/tests"
LAYERS = {
    "transfer": ["tests/faults/test_transfer_*.py", "tests/faults/test_access_key.py"],
    "store": [
        "tests/faults/test_store*.py",
        f"{STORE}/test_faults.py",
        f"{STORE}/test_reads.py",
        f"{STORE}/test_stopped_owners.py",
        f"{STORE}/test_late_writers.py",
        f"{STORE}/test_clocks.py",
        f"{STORE}/test_before_set_up.py",
        f"{STORE}/test_file_tier.py",
        f"{STORE}/test_object_tiers.py",
        f"{STORE}/test_tiers.py",
        f"{STORE}/cluster/test_steps.py",
        f"{STORE}/cluster/test_failover.py",
        f"{STORE}/cluster/test_coordination_faults.py",
    ],
    "ep": [
        f"{EP}/test_faults.py",
        f"{EP}/test_messages.py",
        f"{EP}/test_churn.py",
        f"{EP}/test_hosts.py",
        f"{EP}/test_agreement.py",
    ],
    "serve": ["tests/faults/test_killed_*.py", "tests/faults/test_refused_starts.py"],
}


def files_of(layer: str) -> list[str]:
    """The test files of a layer. Raises SystemExit for a pattern that names none."""
    found = []
    for pattern in LAYERS[layer]:
        files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        if not files:
            raise SystemExit(f"{pattern} of the faults of {layer} names no file")
        found += files
    return found


def main(arguments: list[str]) -> int:
    """Run pytest, whose exit status is returned."""
    layers = [argument for argument in arguments if argument in LAYERS]
    options = [argument for argument in arguments if argument not in LAYERS]
    files = [file for layer in layers or LAYERS for file in files_of(layer)]
    return subprocess.call([sys.executable, "-m", "pytest", *files, *options], cwd=ROOT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
