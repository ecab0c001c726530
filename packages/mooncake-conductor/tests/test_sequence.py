"""What a sequence number means: next, seen before, gap, or a publisher that started anew."""

import itertools

from mooncake_conductor import sequence
from mooncake_conductor.sequence import SequenceTracker, Verdict


def tracker_at(count: int) -> SequenceTracker:
    tracker = SequenceTracker()
    for number in range(count):
        tracker.advance(number, b"batch %d" % number)
    return tracker


def test_numbers_in_order_are_next() -> None:
    tracker = SequenceTracker()
    for number in range(5):
        assert tracker.judge(number, b"x") is Verdict.NEXT
        tracker.advance(number, b"x")


def test_a_number_that_was_skipped_to_is_a_gap() -> None:
    assert tracker_at(3).judge(5, b"x") is Verdict.GAP


def test_the_same_batch_again_is_a_duplicate() -> None:
    assert tracker_at(3).judge(1, b"batch 1") is Verdict.DUPLICATE


def test_another_batch_under_an_old_number_is_a_restart() -> None:
    assert tracker_at(3).judge(1, b"another") is Verdict.RESTART


def test_after_a_restart_zero_is_next_and_nothing_is_remembered() -> None:
    tracker = tracker_at(3)
    tracker.restart()
    assert not tracker.joined
    assert tracker.judge(0, b"batch 0") is Verdict.NEXT


def test_memory_of_old_batches_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(sequence, "REMEMBERED_BATCHES", 4)
    tracker = tracker_at(10)
    verdicts = [tracker.judge(number, b"batch %d" % number) for number in range(10)]
    assert verdicts == list(itertools.chain([Verdict.RESTART] * 6, [Verdict.DUPLICATE] * 4))
