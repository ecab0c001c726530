"""Some of torch's own tests; `hatch run torch-suite` runs them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ["test_all_reduce_sum_async", "test_send_recv_any_source", "test_accumulate_gradients_no_sync"]


def test_some_of_torchs_own_tests_pass() -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it: pip install expecttest")
    command = [sys.executable, str(Path(__file__).parents[1] / "torch_suite"), *NAMES, "--alone"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.splitlines()[-1:] == ["3 passed, 0 failed, 0 not applicable"], (
        done.stdout + done.stderr
    )
