"""The other side of a test: an engine that owns regions, in this process or behind a pipe in another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.testing.pattern import digest, pattern

__all__ = ["KINDS", "OwnedRegion", "RegionOwner", "Target"]

# Where a region's memory comes from: the engine, or the test.
KINDS = ("engine", "numpy", "bytearray")


@dataclass(frozen=True, slots=True)
class OwnedRegion:
    """A region of a target: the number that its owner knows it by, and what reaches it."""

    number: int
    descriptor: bytes


class Target(Protocol):
    """What tests ask of the other side. Implemented by RegionOwner and PeerProcess."""

    def allocate(self, nbytes: int, seed: int, kind: str = "engine") -> OwnedRegion:
        """Register memory of one of KINDS, filled with ``pattern(seed, nbytes)``."""

    def digest(self, number: int) -> str:
        """Fingerprint what a region's memory holds, also after it was closed."""

    def fill(self, number: int, seed: int) -> None:
        """Overwrite a region's memory with another pattern, also after it was closed."""

    def close_region(self, number: int, timeout_s: float) -> None:
        """Close a region; it fails as ``Region.close`` does."""

    def grant(self, number: int, access: str) -> bytes:
        """Return a descriptor of a region with a key of its own, for ``r``, ``w`` or ``rw``."""

    def revoke(self, number: int, descriptor: bytes, timeout_s: float) -> None:
        """Take back what ``grant`` gave; it fails as ``Region.revoke`` does."""

    def write(self, number: int, descriptor: bytes, blocks: list[list[int]], timeout_s: float) -> None:
        """Write blocks of an own region to another one and wait for the end."""

    def clear(self) -> None:
        """Close every region and forget it."""


class RegionOwner:
    """A Target in this process."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self._numbers = itertools.count(1)
        self._regions: dict[int, Region] = {}
        # Views outlive their regions: tests look at what happens to memory after it was closed.
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}

    def allocate(self, nbytes: int, seed: int, kind: str = "engine") -> OwnedRegion:
        """Register memory of one of KINDS, filled with ``pattern(seed, nbytes)``."""
        number = next(self._numbers)
        if kind == "engine":
            region = self.engine.allocate(nbytes, name=f"owned-{number}")
            memory = np.frombuffer(region.view(), dtype=np.uint8)
        else:
            source = np.zeros(nbytes, dtype=np.uint8) if kind == "numpy" else bytearray(nbytes)
            region = self.engine.register(source, name=f"owned-{number}")
            memory = np.frombuffer(source, dtype=np.uint8)
        self._regions[number], self._memory[number] = region, memory
        self.fill(number, seed)
        return OwnedRegion(number, region.descriptor())

    def digest(self, number: int) -> str:
        """Fingerprint what a region's memory holds, also after it was closed."""
        return digest(self._memory[number])

    def fill(self, number: int, seed: int) -> None:
        """Overwrite a region's memory with another pattern, also after it was closed."""
        memory = self._memory[number]
        memory[:] = pattern(seed, memory.nbytes)

    def close_region(self, number: int, timeout_s: float) -> None:
        """Close a region; it fails as ``Region.close`` does."""
        self._regions[number].close(timeout_s)

    def grant(self, number: int, access: str) -> bytes:
        """Return a descriptor of a region with a key of its own, for ``r``, ``w`` or ``rw``."""
        return self._regions[number].grant(cast(Literal["r", "w", "rw"], access))

    def revoke(self, number: int, descriptor: bytes, timeout_s: float) -> None:
        """Take back what ``grant`` gave; it fails as ``Region.revoke`` does."""
        self._regions[number].revoke(descriptor, timeout_s)

    def write(self, number: int, descriptor: bytes, blocks: list[list[int]], timeout_s: float) -> None:
        """Write blocks of an own region to another one and wait for the end."""
        remote = self.engine.import_region(descriptor)
        self.engine.write(self._regions[number], remote, np.array(blocks, dtype=np.uint64)).wait(timeout_s)

    def clear(self) -> None:
        """Close every region and forget it."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        self._memory.clear()
