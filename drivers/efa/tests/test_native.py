"""What the core costs by itself, over a libfabric whose operations are over when they are posted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from fabric_double import HERE, INCLUDE, double_library

from mooncake_transfer.testing.compiling import compiled

OPERATIONS = 1 << 20
DEADLINE_S = 60


def test_the_hot_path_allocates_nothing_and_rings_once_for_16() -> None:
    """A million small writes in batches of 1,024, by an engine that never waits."""
    source = HERE / "native/hot_path.cpp"
    probe = compiled("hot_path.so", [source], "-O1", "-g", "-shared", "-ldl", include=INCLUDE)
    script = [sys.executable, str(HERE / "native/hot_path.py"), str(probe), str(double_library()), "0"]
    done = subprocess.run(
        [*script, str(OPERATIONS)],
        env=os.environ | {"LD_PRELOAD": str(probe)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["operations"] == OPERATIONS
    assert counted["allocations_before"] > 0, "the allocator of the test is not in use"
    assert counted["allocations"] == 0
    assert counted["doorbells"] <= OPERATIONS // 16 + 64  # and those of messages
