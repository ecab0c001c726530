from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from mooncake_store.eviction import Clock


def filled(*items):
    clock = Clock()
    for item in items:
        clock.insert(item)
    return clock


def evict(clock):
    victim = clock.victim()
    if victim is not None:
        clock.remove(victim)
    return victim


def test_untouched_ids_leave_in_the_order_they_came():
    clock = filled(1, 2, 3)
    assert [evict(clock) for _ in range(4)] == [1, 2, 3, None]


def test_each_of_up_to_three_uses_buys_one_more_round():
    clock = filled(1, 2, 3)
    for _ in range(9):
        clock.touch(1)
    clock.touch(2)
    rounds = []
    for new in range(4, 12):
        rounds.append(evict(clock))
        clock.insert(new)
    assert rounds[0] == 3
    assert rounds.index(2) < rounds.index(1)
    assert 1 in rounds


def test_a_prefix_leaves_from_its_tail():
    prefix = [1, 2, 3, 4]
    clock = filled(*reversed(prefix))
    for block in reversed(prefix[:2]):
        clock.touch(block)
    assert [evict(clock) for _ in prefix] == [4, 3, 2, 1]


def test_pinned_ids_stay_until_the_last_pin_is_gone():
    clock = filled(1, 2)
    clock.pin(1)
    clock.pin(1)
    clock.pin(2)
    assert clock.victim() is None
    clock.unpin(1)
    assert clock.victim() is None
    clock.unpin(1)
    assert clock.victim() == 1
    clock.unpin(2)
    assert [evict(clock), evict(clock), evict(clock)] == [1, 2, None]


def test_a_victim_stays_until_it_is_removed():
    clock = filled(1, 2)
    assert clock.victim() == clock.victim() == 1
    assert len(clock) == 2


@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "touch", "pin", "unpin", "remove", "evict"]), st.integers(0, 9))
    )
)
def test_the_victim_is_always_an_id_that_is_there_and_not_pinned(steps):
    clock, pins = Clock(), OrderedDict()
    for step, item in steps:
        if step == "insert" and item not in pins:
            clock.insert(item)
            pins[item] = 0
        elif step == "evict":
            victim = clock.victim()
            assert (victim is None) == all(pins.values())
            if victim is not None:
                assert pins[victim] == 0
        elif item in pins:
            if step == "pin":
                pins[item] += 1
            elif step == "unpin" and pins[item]:
                pins[item] -= 1
            elif step == "remove":
                del pins[item]
            else:
                continue
            getattr(clock, step)(item)
        assert len(clock) == len(pins)
        assert all(key in clock for key in pins)
