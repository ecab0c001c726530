"""Tests run on doubles of the ACL runtime and of HIXL."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests and the processes that they start share its modules.
sys.path.insert(0, str(Path(__file__).parent / "double"))
