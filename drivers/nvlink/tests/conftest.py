"""Tests run on a test double of libcuda; those of test_on_gpu.py on a GPU, where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests and the processes that they start share its modules.
sys.path.insert(0, str(Path(__file__).parent / "double"))

from gpu_fixtures import device, engine, library  # noqa: F401 - of that folder
