"""Which registered ranges may overlap, and which region holds an address.

The rule: ranges may be equal or lie inside one another. Each is a region of its own with its own key, and
closing or revoking one leaves the others as they are: a cache as a whole for one peer, a layer of it for
another. Ranges that overlap in part are refused: that is nearly always a wrong length, or memory that was
freed and given out again while still registered.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Hashable

from mooncake_transfer._errors import RegionOverlap
from mooncake_transfer._memory.description import Memory, MemoryKind

__all__ = ["RegionMap"]


class _Range:
    """A range, the regions that have exactly it, and the ranges inside, which do not overlap, in order."""

    __slots__ = ("begin", "begins", "end", "inside", "names", "outer")

    def __init__(self, begin: int, end: int, outer: _Range | None):
        self.begin = begin
        self.end = end
        self.outer = outer
        self.names: dict[int, str] = {}
        self.begins: list[int] = []
        self.inside: list[_Range] = []

    def touched(self, begin: int, end: int) -> slice:
        """The ranges inside that have bytes in ``begin``..``end``."""
        first = bisect.bisect_right(self.begins, begin)
        if first and self.inside[first - 1].end > begin:
            first -= 1
        return slice(first, max(first, bisect.bisect_left(self.begins, end)))


class RegionMap:
    """The registered ranges of an engine. Thread-safe.

    Adding, removing and finding take O(depth x log n) comparisons; depth: how many lie in one another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[Hashable, _Range] = {}
        self._places: dict[int, _Range] = {}

    def add(self, region_id: int, memory: Memory, name: str) -> None:
        """Enter a region. Raises RegionOverlap, naming the other, when it overlaps one in part."""
        space, begin = _place_of(memory)
        end = begin + memory.nbytes
        with self._lock:
            outer = self._spaces.setdefault(space, _Range(0, 1 << 65, None))
            while True:
                touched = outer.touched(begin, end)
                inner = outer.inside[touched]
                if len(inner) != 1 or not (inner[0].begin <= begin and end <= inner[0].end):
                    break
                outer = inner[0]
            if (outer.begin, outer.end) == (begin, end):
                place = outer
            else:
                for other in inner:
                    if other.begin < begin or end < other.end:
                        raise _overlap(name, begin, end, other)
                place = _enclose(outer, touched, begin, end)
            place.names[region_id] = name
            self._places[region_id] = place

    def remove(self, region_id: int) -> None:
        """Forget a region; what lies inside or around it stays. One that is not here is no error."""
        with self._lock:
            place = self._places.pop(region_id, None)
            if place is None:
                return
            del place.names[region_id]
            outer = place.outer
            if place.names or outer is None:
                return
            at = outer.touched(place.begin, place.end)
            for inner in place.inside:
                inner.outer = outer
            outer.inside[at] = place.inside
            outer.begins[at] = place.begins

    def find(self, address: int, nbytes: int = 1) -> list[int]:
        """Return the regions in memory (also a GPU's) that hold all of a range, smallest first."""
        found: list[int] = []
        with self._lock:
            outer = self._spaces.get("memory")
            while outer is not None:
                found[:0] = reversed(outer.names)
                inner = outer.inside[outer.touched(address, address + nbytes)]
                holds = len(inner) == 1 and inner[0].begin <= address and address + nbytes <= inner[0].end
                outer = inner[0] if holds else None
        return found

    def __len__(self) -> int:
        return len(self._places)


def _enclose(outer: _Range, touched: slice, begin: int, end: int) -> _Range:
    """Put a new range into ``outer``, around the ranges that lie in it."""
    place = _Range(begin, end, outer)
    place.inside, place.begins = outer.inside[touched], outer.begins[touched]
    for inner in place.inside:
        inner.outer = place
    outer.inside[touched] = [place]
    outer.begins[touched] = [begin]
    return place


def _place_of(memory: Memory) -> tuple[Hashable, int]:
    """The address space and first byte of a range. CUDA's addresses are unique in a process too."""
    if memory.location:
        return (memory.kind, memory.location), memory.fd_offset
    if memory.kind in (MemoryKind.FILE, MemoryKind.BLOCK):
        status = os.fstat(memory.fd)
        file = status.st_rdev if memory.kind is MemoryKind.BLOCK else (status.st_dev, status.st_ino)
        return (memory.kind, file), memory.fd_offset
    return "memory", memory.address


def _overlap(name: str, begin: int, end: int, other: _Range) -> RegionOverlap:
    names = next(iter(other.names.values()))
    return RegionOverlap(
        f"region {name!r} ({end - begin} bytes at {begin:#x}) overlaps region {names!r} "
        f"({other.end - other.begin} bytes at {other.begin:#x}) in part; close that one first, "
        "or register a range that is equal to it, inside it or around it"
    )
