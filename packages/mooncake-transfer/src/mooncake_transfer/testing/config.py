"""What test doubles and suites take from the environment; nothing else in this package reads it."""

from __future__ import annotations

import os

__all__ = ["wanted_compiler"]


def wanted_compiler() -> str:
    """The C++ compiler that CXX names, with its arguments; empty: none."""
    return os.environ.get("CXX", "")
