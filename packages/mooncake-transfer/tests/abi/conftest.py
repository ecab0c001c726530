"""Lets the tests of the driver ABI share loopback.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
