import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_store.allocator import BestFit

GRANULE = 4096


class AllocatorMachine(RuleBasedStateMachine):
    """Compares the allocator with a plain list of what is taken."""

    def __init__(self):
        super().__init__()
        self.space = BestFit(64 * GRANULE + 17, GRANULE)
        self.live = []

    @rule(nbytes=st.integers(0, 40 * GRANULE), max_pieces=st.integers(1, 4))
    def allocate(self, nbytes, max_pieces):
        holes = sorted(self.holes(), reverse=True)
        fits = sum(holes[:max_pieces]) >= self.space.rounded(nbytes)
        pieces = self.space.allocate(nbytes, max_pieces)
        assert (pieces is not None) == fits
        if pieces:
            assert sum(size for _, size in pieces) == nbytes
            assert len(pieces) <= max_pieces
            assert all(size % GRANULE == 0 for _, size in pieces[:-1])
            if len(pieces) == 1:
                best = min(hole for hole in holes if hole >= self.space.rounded(nbytes))
                assert best - self.space.rounded(nbytes) in [*self.holes_after(pieces), 0]
            self.live += pieces

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        piece = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.space.free(*piece)

    def taken(self):
        return sorted((offset, offset + self.space.rounded(size)) for offset, size in self.live)

    def holes(self):
        ends = [0] + [end for _, end in self.taken()]
        starts = [start for start, _ in self.taken()] + [self.space.capacity_bytes]
        return [start - end for start, end in zip(starts, ends, strict=True) if start > end]

    def holes_after(self, pieces):
        before = self.live
        self.live = before + pieces
        holes = self.holes()
        self.live = before
        return holes

    @invariant()
    def nothing_overlaps_and_no_byte_is_lost(self):
        taken = self.taken()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
        assert all(start >= 0 and end <= self.space.capacity_bytes for start, end in taken)
        assert self.space.free_bytes == self.space.capacity_bytes - sum(end - start for start, end in taken)
        assert self.space.free_bytes == sum(self.holes())
        assert self.space.largest_hole_bytes == max(self.holes(), default=0)
        assert self.space.live_extents == {start: end - start for start, end in taken}


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_smallest_hole_that_fits_is_taken():
    space = BestFit(10 * GRANULE, GRANULE)
    pieces = [space.allocate(n * GRANULE, 1)[0] for n in (3, 1, 2, 1, 3)]
    space.free(*pieces[0])
    space.free(*pieces[2])
    assert space.allocate(2 * GRANULE, 1) == [(4 * GRANULE, 2 * GRANULE)]


def test_what_fits_in_no_hole_is_cut_into_the_fewest_pieces():
    space = BestFit(8 * GRANULE, GRANULE)
    pieces = [space.allocate(GRANULE, 1)[0] for _ in range(8)]
    for index in (0, 2, 3, 5):
        space.free(*pieces[index])
    assert space.allocate(3 * GRANULE - 5, 4) == [(2 * GRANULE, 2 * GRANULE), (0, GRANULE - 5)]
    assert space.allocate(2 * GRANULE, 4) is None
    assert space.free_bytes == GRANULE


def test_giving_back_what_was_not_taken_is_caught():
    space = BestFit(4 * GRANULE, GRANULE)
    (piece,) = space.allocate(GRANULE, 1)
    space.free(*piece)
    with pytest.raises(KeyError):
        space.free(*piece)
