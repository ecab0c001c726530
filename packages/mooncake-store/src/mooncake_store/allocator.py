"""Exact best-fit allocation inside one segment.

The smallest hole that fits is taken, neighbouring holes merge at once, and a request that fits in no hole
may be cut into several pieces. Sizes are rounded up to granules. Knows numbers only, no memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["BestFit"]


class BestFit:
    """Free space of one segment of ``capacity_bytes`` (rounded down to granules). Not thread-safe."""

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None:
        self.granule_bytes = granule_bytes
        self.capacity_bytes = capacity_bytes // granule_bytes * granule_bytes
        self.free_bytes = 0
        # One truth in three orders: holes by size, by start and by end, all in bytes.
        self._by_size: list[tuple[int, int]] = []
        self._size_at_start: dict[int, int] = {}
        self._start_at_end: dict[int, int] = {}
        self._live: dict[int, int] = {}
        if self.capacity_bytes:
            self._add_hole(0, self.capacity_bytes)

    def rounded(self, nbytes: int) -> int:
        """``nbytes`` rounded up to whole granules: what it takes of the segment."""
        return -(-nbytes // self.granule_bytes) * self.granule_bytes

    @property
    def largest_hole_bytes(self) -> int:
        """The largest value that still fits in one piece."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def live_extents(self) -> dict[int, int]:
        """Start -> bytes taken, of everything allocated and not freed."""
        return dict(self._live)

    def allocate(self, nbytes: int, max_pieces: int) -> list[tuple[int, int]] | None:
        """Room for ``nbytes`` as (offset, bytes) pieces in order, or None when it does not fit in
        ``max_pieces``.

        The pieces' bytes add up to ``nbytes``; every piece but the last fills its granules. Nothing is
        taken for 0.
        """
        if nbytes == 0:
            return []
        pieces: list[tuple[int, int]] = []
        missing = nbytes
        while missing and len(pieces) < max_pieces:
            hole = self._best_hole(self.rounded(missing))
            if hole is None:
                break
            size, start = hole
            taken = min(size, self.rounded(missing))
            self._take(start, size, taken)
            pieces.append((start, min(taken, missing)))
            missing -= min(taken, missing)
        if missing:
            for start, size in pieces:
                self.free(start, size)
            return None
        return pieces

    def free(self, offset: int, nbytes: int) -> None:
        """Give back one piece exactly as :meth:`allocate` returned it."""
        size = self._live.pop(offset)
        assert size == self.rounded(nbytes), f"piece at {offset} has {size} bytes, {nbytes} were given back"
        left = self._start_at_end.get(offset)
        if left is not None:
            size += self._drop_hole(left)
            offset = left
        if offset + size in self._size_at_start:
            size += self._drop_hole(offset + size)
        self._add_hole(offset, size)

    def _best_hole(self, size: int) -> tuple[int, int] | None:
        # The smallest hole that holds it all, else the largest there is: that needs the fewest pieces.
        at = bisect_left(self._by_size, (size, -1))
        if at < len(self._by_size):
            return self._by_size[at]
        return self._by_size[-1] if self._by_size else None

    def _take(self, start: int, size: int, taken: int) -> None:
        self._drop_hole(start)
        if size > taken:
            self._add_hole(start + taken, size - taken)
        self._live[start] = taken

    def _add_hole(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at_start[start] = size
        self._start_at_end[start + size] = start
        self.free_bytes += size

    def _drop_hole(self, start: int) -> int:
        size = self._size_at_start.pop(start)
        del self._start_at_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.free_bytes -= size
        return size
