"""On a real GPU, where there is one: two processes, bytes compared, GB/s against a plain copy."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_driver_nvlink import plugin
from mooncake_transfer.hooks import Unavailable

LIMIT_S = 300
LEAST_SHARE = 0.95  # of a plain device copy, at the largest size


def test_two_processes_on_a_gpu_move_bytes_at_the_speed_of_a_copy() -> None:
    found = plugin.probe({})
    if isinstance(found, Unavailable):
        pytest.skip(f"no GPU: {found.reason}")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    # A process of its own: this one may have loaded a double of libcuda.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("on_gpu.py"))],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])["sizes"]
    largest = sizes[max(sizes, key=int)]
    assert largest["read_gb_s"] >= LEAST_SHARE * largest["copy_gb_s"], sizes
