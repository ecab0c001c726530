"""The example that the README shows, run as people run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "moe_serving"


@pytest.mark.slow
def test_tokens_stay_equal_while_a_rank_is_killed_comes_back_and_another_arrives() -> None:
    victim = 0  # the rank that made the group, and that speaks for all
    command = [sys.executable, str(EXAMPLE), "--kill", str(victim), "--sequences", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"kill -9 of rank {victim}" in done.stdout
    assert "; no expert is lost" in done.stdout
    assert done.stdout.count("each has 2 owners or more") == 3
    assert "rank 4 is let in" in done.stdout
    assert "all equal to those of one process" in done.stdout
