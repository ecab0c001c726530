"""On a real GPU, where there is one: two processes, bytes compared, GB/s against a plain copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_double import installed

from mooncake_driver_nvlink import plugin
from mooncake_transfer.hooks import Unavailable

LIMIT_S = 300
LEAST_SHARE = 0.95  # of a plain device copy, at the largest size


def run(*sizes: str) -> dict[str, dict[str, float]]:
    """Run the program in a process of its own: this one may have loaded a double of libcuda."""
    command = [sys.executable, str(Path(__file__).with_name("on_gpu.py")), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])["sizes"]
    return found


def test_what_runs_on_a_gpu_runs_over_the_double() -> None:
    """Bytes only: its time means nothing."""
    sizes = ("65536", "1048576")
    with installed():
        assert set(run(*sizes)) == set(sizes)


def test_two_processes_on_a_gpu_move_bytes_at_the_speed_of_a_copy() -> None:
    found = plugin.probe({})
    if isinstance(found, Unavailable):
        pytest.skip(f"no GPU: {found.reason}")
    sizes = run()
    largest = sizes[max(sizes, key=int)]
    assert largest["read_gb_s"] >= LEAST_SHARE * largest["copy_gb_s"], sizes
