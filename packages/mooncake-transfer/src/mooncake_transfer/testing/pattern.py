"""Bytes that tell where they came from: every seed gives others, without a period."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["digest", "pattern"]


def pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return ``nbytes`` pseudo-random bytes, the same in every process for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def digest(memory: npt.NDArray[np.uint8]) -> str:
    """Return a fingerprint of contiguous memory, to compare bytes across processes."""
    return hashlib.sha256(memory.data).hexdigest()
