"""The policies of the compiled core, against slow ones that are written for reading."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_store._core import EvictionQueue
from mooncake_store.testing import EvictionContract


def numbers(*values):
    return np.array(values, dtype=np.uint64)


class Lru:
    """Ids from the oldest to the youngest, and the rules on pins that all policies share."""

    def __init__(self):
        self.order, self.parked, self.pins, self.about = [], set(), {}, {}
        self.last = None

    def insert(self, id, key, nbytes):
        self.pins[id], self.about[id] = 0, (key, nbytes)
        self.enter(id)

    def pin(self, id):
        self.pins[id] += 1

    def unpin(self, id):
        self.pins[id] -= 1
        if not self.pins[id] and id in self.parked:
            self.parked.remove(id)
            self.come_back(id)

    def remove(self, id):
        if id == self.last:
            self.evicted(id)
            self.last = None
        if id in self.parked:
            self.parked.remove(id)
        else:
            self.leave(id)
        del self.pins[id], self.about[id]

    def victim(self):
        self.last = None
        while (id := self.oldest()) is not None:
            if self.pins[id]:
                self.leave(id)
                self.parked.add(id)
            elif not self.spare(id):
                self.last = id
                break
        return self.last

    def enter(self, id):
        self.order.append(id)

    def come_back(self, id):
        self.order.append(id)

    def leave(self, id):
        self.order.remove(id)

    def touch(self, id):
        if id not in self.parked:
            self.leave(id)
            self.order.append(id)

    def oldest(self):
        return self.order[0] if self.order else None

    def spare(self, id):
        return False

    def evicted(self, id):
        pass


class Clock(Lru):
    def enter(self, id):
        self.uses = {**getattr(self, "uses", {}), id: 0}
        self.order.append(id)

    def touch(self, id):
        self.uses[id] = min(3, self.uses[id] + 1)

    def spare(self, id):
        if not self.uses[id]:
            return False
        self.uses[id] -= 1
        self.order.append(self.order.pop(0))
        return True


class Arc(Lru):
    def __init__(self):
        super().__init__()
        self.queues, self.lost, self.of = ([], []), ([], []), {}
        self.share, self.capacity = 0.0, 0

    def enter(self, id):
        key = self.about[id][0]
        sizes = [len(lost) for lost in self.lost]
        self.of[id] = int(key in self.lost[0] or key in self.lost[1])
        if key in self.lost[0]:
            self.share = min(self.capacity, self.share + max(1.0, sizes[1] / sizes[0]))
            self.lost[0].remove(key)
        elif key in self.lost[1]:
            self.share = max(0.0, self.share - max(1.0, sizes[0] / sizes[1]))
            self.lost[1].remove(key)
        self.come_back(id)

    def come_back(self, id):
        self.queues[self.of[id]].append(id)

    def leave(self, id):
        self.queues[self.of[id]].remove(id)

    def touch(self, id):
        if id in self.parked:
            self.of[id] = 1
        else:
            self.leave(id)
            self.of[id] = 1
            self.come_back(id)

    def oldest(self):
        once, again = self.queues
        if once and (not again or len(once) > self.share):
            return once[0]
        return again[0] if again else None

    def evicted(self, id):
        self.capacity = len(self.pins)
        lost = self.lost[self.of[id]]
        key = self.about[id][0]
        if key in lost:
            lost.remove(key)
        lost.append(key)
        once = len(self.queues[0]) - (self.of[id] == 0)
        while len(self.lost[0]) > self.capacity - once:
            self.lost[0].pop(0)
        while len(self.lost[1]) > self.capacity - len(self.lost[0]):
            self.lost[1].pop(0)


class Gdsf(Lru):
    def __init__(self):
        super().__init__()
        self.uses, self.ranks, self.floor = {}, {}, 0.0

    def enter(self, id):
        self.uses[id] = 0
        self.order.append(id)
        self.touch(id)

    def touch(self, id):
        self.uses[id] += 1
        self.ranks[id] = self.floor + self.uses[id] / max(1, self.about[id][1])
        super().touch(id)

    def oldest(self):
        return min(self.order, key=lambda id: self.ranks[id], default=None)

    def evicted(self, id):
        self.floor = max(self.floor, self.ranks[id])


REFERENCES = {"clock": Clock, "lru": Lru, "arc": Arc, "gdsf": Gdsf}


@pytest.mark.parametrize("name", REFERENCES)
class TestContract(EvictionContract):
    @pytest.fixture(autouse=True)
    def _named(self, name):
        self.name = name

    def make(self):
        return EvictionQueue(self.name)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "touch", "touch", "pin", "unpin", "remove", "evict", "evict"]),
        st.integers(0, 11),
        st.sampled_from([0, 1, 4096, 8192, 40_000]),
    ),
    max_size=120,
)


@pytest.mark.parametrize("name", REFERENCES)
@given(steps=STEPS)
@settings(deadline=None, max_examples=150)
def test_the_same_ids_leave_in_the_same_order_as_of_the_reference(name, steps):
    queue, reference = EvictionQueue(name), REFERENCES[name]()
    id_of, last_id = {}, 100  # keys come back under new ids, as versions of a stored key do
    for step, key, nbytes in steps:
        id = id_of.get(key)
        if step == "insert" and id is None:
            last_id += 1
            id_of[key] = last_id
            queue.insert(numbers(last_id), numbers(key), numbers(nbytes))
            reference.insert(last_id, key, nbytes)
        elif step == "evict":
            victim = queue.victim()
            assert victim == reference.victim()
            if victim is not None and nbytes:
                queue.remove(numbers(victim))
                del id_of[reference.about[victim][0]]
                reference.remove(victim)
        elif id is not None and step != "insert" and (step != "unpin" or reference.pins[id]):
            getattr(queue, step)(numbers(id))
            getattr(reference, step)(id)
            if step == "remove":
                del id_of[key]
        assert len(queue) == len(id_of)
        assert all(id in queue for id in id_of.values())
    while (victim := queue.victim()) is not None:
        assert victim == reference.victim()
        queue.remove(numbers(victim))
        reference.remove(victim)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_prefix_leaves_from_its_tail(name):
    queue = EvictionQueue(name)
    queue.insert(numbers(4, 3, 2, 1), numbers(4, 3, 2, 1), numbers(1, 1, 1, 1))
    queue.touch(numbers(2, 1))
    left = []
    while (victim := queue.victim()) is not None:
        queue.remove(numbers(victim))
        left.append(victim)
    assert left == [4, 3, 2, 1]


def test_each_of_up_to_three_uses_buys_one_more_round_of_the_clock():
    queue = EvictionQueue("clock")
    queue.insert(numbers(1, 2, 3), numbers(1, 2, 3), numbers(1, 1, 1))
    queue.touch(numbers(*[1] * 9, 2))
    rounds = []
    for new in range(4, 12):
        rounds.append(queue.victim())
        queue.remove(numbers(rounds[-1]))
        queue.insert(numbers(new), numbers(new), numbers(1))
    assert rounds[0] == 3
    assert rounds.index(2) < rounds.index(1)


def test_gdsf_keeps_small_objects_rather_than_large_ones():
    queue = EvictionQueue("gdsf")
    queue.insert(numbers(1, 2, 3), numbers(1, 2, 3), numbers(4096, 1 << 20, 8192))
    queue.touch(numbers(2))
    assert queue.victim() == 2


def test_what_cannot_be_done_is_named():
    queue = EvictionQueue("lru")
    queue.insert(numbers(1), numbers(1), numbers(1))
    with pytest.raises(ValueError, match="id 1 is in the queue already"):
        queue.insert(numbers(2, 1), numbers(2, 1), numbers(1, 1))
    assert 2 in queue
    for step in ("touch", "pin", "unpin", "remove"):
        with pytest.raises(KeyError, match="id 9 is not in the queue"):
            getattr(queue, step)(numbers(9))
    with pytest.raises(KeyError, match="id 1 is not pinned"):
        queue.unpin(numbers(1))
    with pytest.raises(ValueError, match="one length"):
        queue.insert(numbers(3), numbers(3, 4), numbers(1))
    with pytest.raises(ValueError, match="no eviction policy 'fifo'"):
        EvictionQueue("fifo")
