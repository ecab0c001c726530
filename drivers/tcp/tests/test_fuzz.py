"""Nonsense from both sides of a connection, see fuzz/run.py for the long run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
from run import build, compiler, fuzz

FRAMES = 20_000


def test_malformed_frames_end_their_connection_and_nothing_else(tmp_path: Path) -> None:
    cxx = compiler()
    if cxx is None:
        pytest.skip("no C++ compiler on this machine to build the fuzzer with")
    assert "frames as initiator" in fuzz(build(tmp_path, cxx, sanitize=False), FRAMES, seed=1, timeout_s=60)
