import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_store._core import BestFit

GRANULE = 4096
SMALL_BYTES = 64 << 10
LARGE = 17  # granules: no longer small


class Reference:
    """The same rules over a list of granules: each has the start of the piece it belongs to, or None."""

    def __init__(self, granules, granule):
        self.owner, self.granule = [None] * granules, granule

    def rounded(self, nbytes):
        return -(-nbytes // self.granule) * self.granule

    def holes(self):
        """Start -> granules."""
        holes, at = {}, 0
        for taken, run in itertools.groupby(self.owner, lambda owner: owner is not None):
            length = len(list(run))
            if not taken:
                holes[at] = length
            at += length
        return holes

    def allocate(self, nbytes, max_pieces):
        before, pieces, missing = list(self.owner), [], nbytes
        while missing and len(pieces) < max_pieces and (holes := self.holes()):
            size = self.rounded(missing) // self.granule
            fitting = [start for start in holes if holes[start] >= size]
            if fitting and missing == nbytes <= SMALL_BYTES:
                start = max(fitting)
                start += holes[start] - size
            elif fitting:
                start = min(fitting, key=lambda start: (holes[start], start))
            else:
                start = max(holes, key=lambda start: (holes[start], start))
                size = holes[start]
            self.owner[start : start + size] = [start] * size
            pieces.append((start * self.granule, min(size * self.granule, missing)))
            missing -= pieces[-1][1]
        if missing:
            self.owner = before
            return None
        return pieces

    def free(self, offset):
        self.owner = [None if owner == offset // self.granule else owner for owner in self.owner]

    def live(self):
        return {
            start * self.granule: self.owner.count(start) * self.granule for start in set(self.owner) - {None}
        }


class AllocatorMachine(RuleBasedStateMachine):
    """Small and large values come and go; every piece lies where the reference puts it."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    @initialize(granule=st.sampled_from([GRANULE, 32 * GRANULE]))
    def lend(self, granule):
        self.space = BestFit(90 * granule + 17, granule)
        self.reference = Reference(90, granule)

    @rule(
        nbytes=st.one_of(
            st.integers(0, 3 * GRANULE), st.integers(0, SMALL_BYTES + 1), st.integers(0, 60 * GRANULE)
        ),
        scale=st.sampled_from([1, 32]),
        max_pieces=st.integers(0, 4),
    )
    def allocate(self, nbytes, scale, max_pieces):
        pieces = self.space.allocate(nbytes * scale, max_pieces)
        assert pieces == self.reference.allocate(nbytes * scale, max_pieces)
        for piece in pieces or []:
            self.pieces.append(piece)

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def free(self, data):
        offset, nbytes = self.pieces.pop(data.draw(st.integers(0, len(self.pieces) - 1)))
        self.space.free(offset, nbytes)
        self.reference.free(offset)

    @invariant()
    def the_numbers_agree(self):
        holes, granule = self.reference.holes(), self.reference.granule
        assert self.space.capacity_bytes == 90 * granule
        assert self.space.free_bytes == sum(holes.values()) * granule
        assert self.space.largest_hole_bytes == max(holes.values(), default=0) * granule
        assert self.space.live_extents == self.reference.live()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_pieces_add_up_and_never_overlap_also_with_granules_of_a_byte():
    space = BestFit(1 << 20, 1)
    taken = []
    for nbytes in (1, 65_536, 65_537, 4095, 4097, 300_000):
        taken += space.allocate(nbytes, 4)
    space.free(*taken.pop(1))
    taken += space.allocate(65_535, 4)
    # No other hole is as large: it is found although its class of sizes holds smaller ones as well.
    whole = space.allocate(space.free_bytes, 4)
    taken.sort()
    assert all(start + nbytes <= after for (start, nbytes), (after, _) in itertools.pairwise(taken))
    assert whole is not None
    assert space.free_bytes == 0


def test_the_smallest_hole_that_fits_is_taken():
    space = BestFit(10 * LARGE * GRANULE, GRANULE)
    pieces = [space.allocate(n * LARGE * GRANULE, 1)[0] for n in (3, 1, 2, 1, 3)]
    space.free(*pieces[0])
    space.free(*pieces[2])
    assert space.allocate(2 * LARGE * GRANULE, 1) == [(4 * LARGE * GRANULE, 2 * LARGE * GRANULE)]


def test_what_fits_in_no_hole_is_cut_into_the_fewest_pieces():
    unit = LARGE * GRANULE
    space = BestFit(8 * unit, GRANULE)
    pieces = [space.allocate(unit, 1)[0] for _ in range(8)]
    for index in (0, 2, 3, 5):
        space.free(*pieces[index])
    assert space.allocate(3 * unit - 5, 4) == [(2 * unit, 2 * unit), (0, unit - 5)]
    assert space.allocate(2 * unit, 4) is None
    assert space.free_bytes == unit


def test_small_values_gather_at_the_end_and_leave_large_holes_whole():
    unit = LARGE * GRANULE
    space = BestFit(150 * unit, GRANULE)
    large = [space.allocate(9 * unit, 1)[0] for _ in range(10)]
    space.free(*large[0])
    small = [space.allocate(1 + number % SMALL_BYTES, 1)[0] for number in range(0, 400_000, 4321)]
    for piece in large[1:]:
        space.free(*piece)
    # Had small values filled the hole that large[0] left, nothing of this size would fit.
    whole = space.allocate(90 * unit, 1)
    assert whole == [(0, 90 * unit)]
    for piece in small:
        space.free(*piece)
    assert space.largest_hole_bytes == 60 * unit


def test_giving_back_what_was_not_taken_is_caught():
    space = BestFit(4 * GRANULE, GRANULE)
    (piece,) = space.allocate(GRANULE, 1)
    with pytest.raises(ValueError, match="has not 4097 bytes"):
        space.free(piece[0], GRANULE + 1)
    with pytest.raises(KeyError, match="no piece begins at"):
        space.free(piece[0] + 1, GRANULE)
    space.free(*piece)
    with pytest.raises(KeyError):
        space.free(*piece)


def test_a_granule_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match="granule_bytes is 3000"):
        BestFit(1 << 20, 3000)
