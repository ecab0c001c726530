"""Where the bytes of a batch lie, segment by segment."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_store._core import lay_out


def laid_out(rows, offsets):
    packed = np.array(rows, dtype="<u8").tobytes()
    found = lay_out(packed, np.array(offsets, dtype=np.uint64))
    return [(segment, blocks.tolist()) for segment, blocks in found]


def test_pieces_are_given_by_segment_in_the_order_in_which_these_come():
    rows = [(0, 0, 7, 100, 10), (0, 10, 3, 0, 5), (1, 0, 7, 500, 4)]
    assert laid_out(rows, [1000, 2000]) == [
        (7, [[1000, 100, 10], [2000, 500, 4]]),
        (3, [[1010, 0, 5]]),
    ]


def test_pieces_that_follow_each_other_on_both_sides_are_one_block():
    rows = [(0, 0, 7, 100, 10), (1, 0, 7, 110, 10), (2, 0, 7, 120, 10), (3, 0, 7, 130, 1)]
    assert laid_out(rows, [0, 10, 21, 31]) == [(7, [[0, 100, 20], [21, 120, 11]])]


def test_offsets_may_be_a_column_of_something_larger():
    parts = np.arange(8, dtype=np.uint64).reshape(2, 4)
    ((segment, blocks),) = lay_out(np.array([(1, 0, 7, 9, 1)], dtype="<u8").tobytes(), parts[:, 2])
    assert (segment, blocks.tolist()) == (7, [[6, 9, 1]])


def test_nothing_lies_nowhere():
    assert laid_out([], [1]) == []


def test_a_position_without_an_offset_and_half_a_row_are_refused():
    with pytest.raises(ValueError, match="position"):
        laid_out([(1, 0, 7, 0, 1)], [0])
    with pytest.raises(ValueError, match="five"):
        lay_out(b"1234567", np.zeros(1, dtype=np.uint64))
