"""Builds the double of libibverbs."""

from __future__ import annotations

import shutil
from pathlib import Path

from mooncake_transfer.testing.compiling import compiled

__all__ = ["build"]

HERE = Path(__file__).parent


def build(folder: Path) -> Path:
    """A double of its own in a folder: the file beside it stands for the network of those who load it."""
    flags = ("-O2", "-shared", "-fvisibility=hidden", "-ldl")
    core = HERE.parents[1] / "core"
    built = compiled("libibverbs_double.so", sorted(HERE.glob("*.cpp")), *flags, include=[core])
    return Path(shutil.copy(built, folder))
