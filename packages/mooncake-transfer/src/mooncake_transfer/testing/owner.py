"""The other side of a test: an engine that owns regions, in this process or behind a pipe in another."""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from mooncake_transfer import Caller, Region, TransferEngine
from mooncake_transfer.memory import FileSource
from mooncake_transfer.testing.pattern import digest, pattern

__all__ = [
    "KINDS",
    "NOTICE_METHOD",
    "DeviceMemory",
    "OwnedRegion",
    "RegionOwner",
    "Target",
    "make_device_memory",
]

NOTICE_METHOD = "written"  # payload: the number of an own region, a colon, anything

# Where a region's bytes are: in memory of the engine or of the test, or in a file. A kind with a colon names
# a function of a driver's tests, as an entry point does, that makes memory of a device: a DeviceMemory.
KINDS = ("engine", "numpy", "bytearray", "file")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OwnedRegion:
    """A region of a target: the number that its owner knows it by, and what reaches it."""

    number: int
    descriptor: bytes


class DeviceMemory(Protocol):
    """Memory that the test brings, of a device. What makes it is called with its size in bytes.

    Attributes:
        source: what ``TransferEngine.register`` takes.
    """

    source: object

    def get(self) -> Bytes:
        """What it holds."""

    def set(self, array: Bytes) -> None:
        """Overwrite all of it."""

    def close(self) -> None:
        """Give it back; also called when it was given back already."""


def make_device_memory(kind: str, nbytes: int) -> DeviceMemory:
    """Call the function that ``module:function`` names."""
    return cast(DeviceMemory, EntryPoint("memory", kind, "mooncake").load()(nbytes))


class Target(Protocol):
    """What tests ask of the other side. Implemented by RegionOwner and PeerProcess."""

    def allocate(self, nbytes: int, seed: int, kind: str | None = None) -> OwnedRegion:
        """Register bytes of one of KINDS (None: the target's own), filled with ``pattern(seed, nbytes)``."""

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

    def listen(self) -> None:
        """From now on keep what comes to NOTICE_METHOD, and nothing of what came before."""

    def told(self) -> list[tuple[str, str]]:
        """Return what came since: the payload, and the digest of its region at that moment."""

    def clear(self) -> None:
        """Close every region and forget it."""


class _Memory:
    """What a region in memory holds. It outlives the region: tests look at what happens to it afterwards."""

    def __init__(self, array: Bytes) -> None:
        self._array = array

    def get(self) -> Bytes:
        return self._array

    def set(self, array: Bytes) -> None:
        self._array[:] = array

    def close(self) -> None:
        """Nothing to do."""


class _File:
    """What a region in a file holds."""

    def __init__(self, nbytes: int) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(nbytes)
            self.fd = os.dup(file.fileno())
        self._nbytes = nbytes
        # Owners that tests do not clear end with the collector.
        self.close = weakref.finalize(self, os.close, self.fd)

    def get(self) -> Bytes:
        array = np.empty(self._nbytes, np.uint8)
        assert os.preadv(self.fd, [array.data], 0) == self._nbytes
        return array

    def set(self, array: Bytes) -> None:
        assert os.pwritev(self.fd, [np.ascontiguousarray(array).data], 0) == self._nbytes


class RegionOwner:
    """A Target in this process. ``kind``: what its regions are made of when nothing else is asked for."""

    def __init__(self, engine: TransferEngine, kind: str = "engine") -> None:
        self.engine = engine
        self._kind = kind
        self._numbers = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._bytes: dict[int, _Memory | _File | DeviceMemory] = {}
        self._told: list[tuple[str, str]] = []
        self._listens = False

    def allocate(self, nbytes: int, seed: int, kind: str | None = None) -> OwnedRegion:
        """Register bytes of one of KINDS (None: the owner's own), filled with ``pattern(seed, nbytes)``."""
        number, kind = next(self._numbers), kind or self._kind
        name = f"owned-{number}"
        held: _Memory | _File | DeviceMemory
        if kind == "engine":
            region = self.engine.allocate(nbytes, name=name)
            held = _Memory(np.frombuffer(region.view(), dtype=np.uint8))
        elif kind == "file":
            self._bytes[number] = held = _File(nbytes)  # first, so that clear() closes it whatever comes
            region = self.engine.register(FileSource(held.fd), name=name)
        elif ":" in kind:
            self._bytes[number] = held = memory = make_device_memory(kind, nbytes)
            region = self.engine.register(memory.source, name=name)
        else:
            source = np.zeros(nbytes, dtype=np.uint8) if kind == "numpy" else bytearray(nbytes)
            region = self.engine.register(source, name=name)
            held = _Memory(np.frombuffer(source, dtype=np.uint8))
        self._regions[number], self._bytes[number] = region, held
        self.fill(number, seed)
        return OwnedRegion(number, region.descriptor())

    def digest(self, number: int) -> str:
        """Fingerprint what a region's memory holds, also after it was closed."""
        return digest(self._bytes[number].get())

    def fill(self, number: int, seed: int) -> None:
        """Overwrite a region's memory with another pattern, also after it was closed."""
        held = self._bytes[number]
        held.set(pattern(seed, held.get().nbytes))

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

    def read(self, number: int, descriptor: bytes, blocks: list[list[int]], timeout_s: float) -> None:
        """Read blocks of another region into an own one and wait for the end."""
        remote = self.engine.import_region(descriptor)
        self.engine.read(self._regions[number], remote, np.array(blocks, dtype=np.uint64)).wait(timeout_s)

    def listen(self) -> None:
        """From now on keep what comes to NOTICE_METHOD, and nothing of what came before."""
        self._told = []
        if not self._listens:
            self.engine.serve(NOTICE_METHOD, self._take)
        self._listens = True

    def _take(self, payload: bytes, caller: Caller) -> None:
        number = int(payload.partition(b":")[0])
        self._told.append((payload.decode(), self.digest(number)))

    def told(self) -> list[tuple[str, str]]:
        """Return what came since: the payload, and the digest of its region at that moment."""
        return list(self._told)

    def clear(self) -> None:
        """Close every region and forget it."""
        for region in self._regions.values():
            region.close()
        for held in self._bytes.values():
            held.close()
        self._regions.clear()
        self._bytes.clear()
