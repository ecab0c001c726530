"""The compiled object map beside a plain model: nothing overlaps, no byte gets lost, leases hold."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_store._core import ObjectMap, PutOptions
from mooncake_store.protocol import Outcome

GRANULE = 4096
KEPT = 31  # level of what is never evicted; see core/order.hpp
keys = st.sampled_from([bytes([number]) * 16 for number in range(12)])
Described = collections.namedtuple("Described", "version digest nbytes state leases broken level extents")


def sizes(*nbytes):
    return np.array(nbytes, dtype="<u8").tobytes()


def positions(rows):
    return np.frombuffer(rows, dtype="<u8").reshape(-1, 5)[:, 0].tolist()


def each(slots):
    return [slots[start : start + 4] for start in range(0, len(slots), 4)]


class ObjectMapMachine(RuleBasedStateMachine):
    """What clients and time may do to a map, at random. Member N lends segments whose ids end with N."""

    def __init__(self):
        super().__init__()
        self.map = ObjectMap(GRANULE, 0.1, "clock")
        self.segments = {}  # id -> owner, granules, node
        self.reserved, self.leased = [], []  # slots; slot, digest
        self.visible = set()
        self.lent = 0

    @initialize(lent=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def lend(self, lent):
        for owner in (1, 2, 3):
            self.map.add_member(owner)
        for granules in lent:
            self.add_segment(granules, 1, False)

    @rule(granules=st.integers(1, 9), owner=st.integers(1, 3), confirms=st.booleans())
    def add_segment(self, granules, owner, confirms):
        self.lent += 1
        number = 10 * self.lent + owner
        self.map.add_segment(number, owner, owner % 2, granules * GRANULE + 5, confirms)
        self.segments[number] = owner, granules, owner % 2

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def drop_segment(self, data):
        number = data.draw(st.sampled_from(sorted(self.segments)))
        lost = self.map.counts()[3]
        self.map.drop_segment(number)
        del self.segments[number]
        gone = self.visible - self.committed().keys()
        assert len(gone) == self.map.counts()[3] - lost
        self.visible -= gone

    @rule(
        batch=st.lists(keys, min_size=1, max_size=3),
        nbytes=st.integers(0, 12 * GRANULE),
        writer=st.integers(1, 3),
        replace=st.booleans(),
        options=st.fixed_dictionaries(
            {
                "replicas": st.integers(1, 3),
                "priority": st.integers(0, 2),
                "hard_pin": st.sampled_from([False, False, True]),
                "soft_until_s": st.sampled_from([0.0, 50.0]),
            }
        ),
        group=st.sampled_from(["", "", "g"]),
    )
    def reserve(self, batch, nbytes, writer, replace, options, group):
        before, room, evicted = self.committed(), self.map.room(), self.map.counts()[1]
        put = PutOptions(writer=writer, replace=replace, now_s=1.0, **options)
        put.group = group
        outcomes, slots, rows, segments, _ = self.map.reserve(
            b"".join(batch), sizes(*[nbytes] * len(batch)), put
        )
        assert set(segments) <= self.segments.keys()
        placed = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.PLACED]
        assert len(slots) == 4 * len(placed)
        assert set(positions(rows)) == (set(placed) if nbytes else set())
        for digest, outcome in zip(batch, outcomes, strict=True):
            assert (outcome == Outcome.EXISTS) == (not replace and digest in before)
        self.check_evicted(before, batch if not replace else [], evicted)
        if list(outcomes) == [Outcome.FULL]:
            _, free, evictable, *_, retiring = room
            assert nbytes > free + evictable or self.map.room()[2] == 0 or self.map.room()[6] > 0, retiring
        self.reserved += each(slots)

    def check_evicted(self, before, batch, evicted):
        gone = self.visible - self.committed().keys()
        assert len(gone) == self.map.counts()[1] - evicted
        assert not gone & set(batch), "what is there of a batch makes no room for the rest of it"
        assert all(before[digest].leases == 0 and before[digest].level != KEPT for digest in gone)
        self.visible -= gone

    @precondition(lambda self: self.reserved)
    @rule(replace=st.booleans(), count=st.integers(1, 3), failed=st.booleans())
    def commit(self, replace, count, failed):
        slots, self.reserved = self.reserved[:count], self.reserved[count:]
        outcomes = self.map.commit(
            b"".join(slots), [0] if failed else [], [b"key"] * len(slots), replace, 1.0
        )
        assert (outcomes[0] == Outcome.FAILED) == failed
        if failed:
            self.reserved.append(slots[0])
        allowed = (
            {Outcome.STORED, Outcome.LOST} if replace else {Outcome.STORED, Outcome.LOST, Outcome.EXISTS}
        )
        assert set(outcomes[failed:]) <= allowed
        now = self.committed().keys()
        assert self.visible <= now, "a commit makes nothing unfindable"
        assert len(now - self.visible) <= outcomes.count(Outcome.STORED)
        self.visible |= now

    @precondition(lambda self: self.reserved)
    @rule()
    def abandon(self):
        self.map.abandon(self.reserved.pop())

    @rule(batch=st.lists(keys, min_size=1, max_size=3), reader=st.integers(1, 3))
    def locate(self, batch, reader):
        found, nbytes, slots, replicas, _ = self.map.locate(b"".join(batch), reader, 0)
        there = self.committed()
        assert [bool(one) for one in found] == [digest in self.visible for digest in batch]
        located = [digest for digest in batch if digest in self.visible]
        expected = [there[digest].nbytes if digest in there else 0 for digest in batch]
        assert np.frombuffer(nbytes, dtype="<u8").tolist() == expected
        rows = np.frombuffer(replicas[0], dtype="<u8").reshape(-1, 5)
        for position, size in enumerate(expected):
            assert rows[rows[:, 0] == position, 4].sum() == size
        self.leased += zip(each(slots), located, strict=True)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data):
        slot, _ = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        self.map.release(slot)

    @rule(batch=st.lists(keys, min_size=1, max_size=2))
    def remove(self, batch):
        found = self.map.remove(b"".join(batch))
        assert found[0] == (batch[0] in self.visible)
        self.visible -= set(batch)

    @rule(batch=st.lists(keys, min_size=1, max_size=2), what=st.sampled_from(["hard", "soft", "unpin"]))
    def pin(self, batch, what):
        digests = b"".join(batch)
        found = (
            self.map.unpin(digests) if what == "unpin" else self.map.pin(digests, what == "hard", 60.0, 1.0)
        )
        assert [bool(one) for one in found] == [digest in self.visible for digest in batch]

    @rule(member=st.integers(1, 3))
    def confirm(self, member):
        pages = self.map.records(member, 1 << 20)
        self.map.confirm(member, self.map.unread(member) + pages[0][0] - 1 if pages else 0)

    def described(self):
        return [Described(*one) for one in self.map.describe()]

    def committed(self):
        return {one.digest: one for one in self.described() if one.state == "committed"}

    @invariant()
    def what_is_found_is_what_was_committed_and_has_not_gone(self):
        assert self.committed().keys() == self.visible
        assert len(self.map) == len(self.visible)
        all_keys = [bytes([number]) * 16 for number in range(12)]
        assert [bool(one) for one in self.map.exist(b"".join(all_keys))] == [
            k in self.visible for k in all_keys
        ]

    @invariant()
    def leases_keep_and_nothing_else_does(self):
        assert sum(one.leases for one in self.described()) == len(self.leased)
        assert all(one.leases > 0 for one in self.described() if one.state == "hidden")
        assert sum(one.state == "reserved" for one in self.described()) == len(self.reserved)

    @invariant()
    def nothing_overlaps_and_every_byte_is_booked(self):
        taken, booked = collections.defaultdict(list), collections.Counter()
        for one in self.described():
            for segment, offset, nbytes, _ in one.extents:
                end = offset + -(-nbytes // GRANULE) * GRANULE
                taken[segment].append((offset, end))
                leased = one.leases or one.state == "hidden"
                use = "reserved" if one.state == "reserved" else "leased" if leased else "kept"
                booked["there" if use == "kept" and one.level != KEPT else use] += end - offset
        for segment, extents in taken.items():
            extents.sort()
            assert all(left[1] <= right[0] for left, right in itertools.pairwise(extents))
            assert extents[-1][1] <= self.segments[segment][1] * GRANULE
        capacity, free, evictable, leased, reserved, kept, retiring = self.map.room()
        assert capacity == sum(granules for _, granules, _ in self.segments.values()) * GRANULE
        assert [booked[use] for use in ("there", "leased", "reserved", "kept")] == [
            evictable,
            leased,
            reserved,
            kept,
        ]
        assert free + sum(booked.values()) + retiring == capacity

    @invariant()
    def replicas_are_whole_and_with_different_owners(self):
        for one in self.described():
            if one.state != "committed":
                continue
            owners = collections.defaultdict(set)
            for segment, _, _, replica in one.extents:
                owners[replica].add(self.segments[segment][0])
            for first, second in itertools.combinations(owners.values(), 2):
                assert not first & second
            whole = [
                replica
                for replica in owners
                if sum(extent[2] for extent in one.extents if extent[3] == replica) == one.nbytes
            ]
            assert whole or one.nbytes == 0

    def teardown(self):
        for slots in self.reserved:
            self.map.abandon(slots)
        for slot, _ in self.leased:
            self.map.release(slot)
        self.map.remove(b"".join(self.visible))
        for member in (1, 2, 3):
            self.map.confirm(member, 1 << 40)
        assert self.map.describe() == []
        assert self.map.room()[0] == self.map.room()[1]


TestObjectMap = ObjectMapMachine.TestCase
TestObjectMap.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def store():
    """A map of 4 granules of member 1."""
    made = ObjectMap(GRANULE, 0.0, "clock")
    made.add_member(1)
    made.add_segment(1, 1, 0, 4 * GRANULE, False)
    return made


def put(store, *names, nbytes=GRANULE, **options):
    digests = b"".join(name * 16 for name in names)
    group, session = options.pop("group", ""), options.pop("session", "")
    put_options = PutOptions(writer=1, **options)
    put_options.group, put_options.session = group, session
    outcomes, slots, *_ = store.reserve(digests, sizes(*[nbytes] * len(names)), put_options)
    if slots:
        store.commit(slots, [], list(names)[: len(slots) // 4], False, 1.0)
    return [Outcome(outcome).name for outcome in outcomes]


def there(store, *names):
    return [bool(found) for found in store.exist(b"".join(name * 16 for name in names))]


def test_what_is_not_reserved_or_leased_cannot_be_given_up_or_released(store):
    _, slots, *_ = store.reserve(b"k" * 16, sizes(10), PutOptions(writer=1))
    store.commit(slots, [], [b"k"], False, 0.0)
    with pytest.raises(ValueError, match="not reserved"):
        store.abandon(slots)
    with pytest.raises(ValueError, match="not reserved"):
        store.commit(slots, [], [b"k"], False, 0.0)
    with pytest.raises(ValueError, match="has no lease"):
        store.release(slots)
    with pytest.raises(ValueError, match="not a multiple of 16"):
        store.exist(b"short")
    with pytest.raises(ValueError, match="one length"):
        store.reserve(b"k" * 16, sizes(1, 2), PutOptions(writer=1))


def test_lower_priorities_go_first_and_the_softly_pinned_last(store):
    put(store, b"a", soft_until_s=50.0)
    put(store, b"b", priority=2)
    put(store, b"c")
    put(store, b"d", priority=1)
    order = []
    for name in (b"w", b"x", b"y", b"z"):
        put(store, name, priority=15)
        order.append(there(store, b"a", b"b", b"c", b"d"))
    assert order == [
        [True, True, False, True],
        [True, True, False, False],
        [True, False, False, False],
        # The first of the new ones goes before what is softly pinned.
        [True, False, False, False],
    ]
    assert there(store, b"w", b"z") == [False, True]


def test_a_soft_pin_ends_with_its_time_and_a_hard_one_does_not(store):
    put(store, b"a", soft_until_s=50.0)
    put(store, b"b", hard_pin=True)
    put(store, b"c", b"d")
    put(store, b"e", b"f", now_s=49.0)
    assert there(store, b"a", b"b", b"c", b"d") == [True, True, False, False]
    put(store, b"g", now_s=50.0, priority=1)
    put(store, b"h", now_s=50.0, priority=1)
    put(store, b"i", now_s=50.0, priority=1)
    assert there(store, b"a", b"b") == [False, True]
    assert put(store, b"x", nbytes=4 * GRANULE) == ["FULL"]
    store.unpin(b"b" * 16)
    assert put(store, b"x", nbytes=4 * GRANULE) == ["PLACED"]


def test_a_group_leaves_together_but_for_what_is_read(store):
    put(store, b"a", b"b", b"c", group="g")
    put(store, b"d")
    _, _, slots, *_ = store.locate(b"c" * 16, 1, 0)
    put(store, b"e")
    assert there(store, b"a", b"b", b"c", b"d") == [False, False, True, True]
    store.release(slots)


def test_values_of_an_ended_session_are_the_first_to_go(store):
    put(store, b"a")
    put(store, b"b", b"c", session="s", priority=9)
    put(store, b"d")
    assert store.end_session(0, "other") == 0
    assert store.end_session(0, "s") == 2
    put(store, b"e", b"f")
    assert there(store, b"a", b"b", b"c", b"d") == [True, False, False, True]


def test_a_tenant_stays_within_its_quota(store):
    strict, own = store.tenant("strict"), store.tenant("own")
    store.limit_tenant(strict, GRANULE, False)
    store.limit_tenant(own, 2 * GRANULE, True)
    assert put(store, b"a", b"b", tenant=strict) == ["PLACED", "QUOTA"]
    assert put(store, b"c", b"d", tenant=own) == ["PLACED", "PLACED"]
    assert put(store, b"e", tenant=own) == ["PLACED"]
    assert there(store, b"a", b"c", b"d", b"e") == [True, True, False, True]
    assert put(store, b"f", tenant=own, nbytes=3 * GRANULE) == ["QUOTA"]
    assert (store.tenant_bytes(strict), store.tenant_bytes(own)) == (GRANULE, 2 * GRANULE)
    store.remove(b"a" * 16)
    assert put(store, b"g", tenant=strict) == ["PLACED"]


def test_room_is_used_again_only_when_its_owner_has_confirmed():
    store = ObjectMap(GRANULE, 0.0, "clock")
    store.add_member(1)
    store.add_segment(1, 1, 0, GRANULE, True)
    put(store, b"a")
    assert put(store, b"b") == ["FULL"]
    assert there(store, b"a") == [False]
    assert store.room()[6] == GRANULE
    ((first, frames),) = store.records(1, 1 << 20)
    assert store.unread(1) == 2
    store.confirm(1, first)
    assert put(store, b"b") == ["FULL"]
    store.confirm(1, first + 1)
    assert put(store, b"b") == ["PLACED"]
    assert len(frames) % 8 == 0


def test_a_put_may_wait_for_a_segment_that_is_not_open_yet():
    store = ObjectMap(GRANULE, 0.0, "clock")
    store.add_member(1)
    store.add_segment(1, 1, 0, GRANULE, True)
    wait = [
        store.reserve(b"k" * 16, sizes(size), PutOptions(writer=1))[4]
        for open_now, size in ((False, 10), (True, 10 * GRANULE))
        if store.open_segment(1, open_now) is None
    ]
    assert wait == [True, False]


def test_room_that_has_to_be_confirmed_is_made_for_a_whole_batch_at_once():
    store = ObjectMap(GRANULE, 0.0, "clock")
    store.add_member(1)
    store.add_segment(1, 1, 0, 6 * GRANULE, True)
    old, new = [b"a", b"b", b"c", b"d", b"e", b"f"], [b"v", b"w", b"x", b"y"]
    for key in old:
        put(store, key)
    assert put(store, *new) == ["FULL"] * 4
    assert sum(there(store, *old)) == 2
    assert put(store, *new) == ["FULL"] * 4  # asked again before the owner has confirmed
    assert sum(there(store, *old)) == 2
    store.confirm(1, 1 << 40)
    assert put(store, *new) == ["PLACED"] * 4
    assert sum(there(store, *old)) == 2


def test_what_a_member_confirms_of_an_earlier_standing_confirms_nothing_of_this_one():
    store = ObjectMap(GRANULE, 0.0, "clock")
    seen = 0
    for member in (1, 2):
        store.add_member(member)
        store.add_segment(member, member, 0, GRANULE, True)
        put(store, b"ab"[member - 1 : member])
        ((first, _),) = store.records(member, 1 << 20)
        store.confirm(member, seen)
        assert store.unread(member) == 1
        seen = first
        store.confirm(1, seen)
        store.drop_segment(1)
        store.drop_member(1)


def test_a_plugin_s_order_decides_in_each_priority():
    class Youngest:
        """The last one in goes first."""

        def __init__(self):
            self.ids, self.pinned = [], collections.Counter()

        def __len__(self):
            return len(self.ids)

        def __contains__(self, id):
            return id in self.ids

        def insert(self, ids, keys, nbytes):
            self.ids += ids.tolist()

        def touch(self, ids):
            pass

        def pin(self, ids):
            self.pinned.update(ids.tolist())

        def unpin(self, ids):
            self.pinned.subtract(ids.tolist())

        def remove(self, ids):
            for id in ids.tolist():
                self.ids.remove(id)

        def victim(self):
            return next((id for id in reversed(self.ids) if not self.pinned[id]), None)

    store = ObjectMap(GRANULE, 0.0, Youngest)
    store.add_member(1)
    store.add_segment(1, 1, 0, 4 * GRANULE, False)
    for name in (b"a", b"b", b"c"):
        put(store, name)
    put(store, b"d", priority=1)
    _, _, slots, *_ = store.locate(b"c" * 16, 1, 0)
    put(store, b"e")
    assert there(store, b"a", b"b", b"c", b"d") == [True, False, True, True]
    store.release(slots)
    store.remove(b"e" * 16)
    put(store, b"f", nbytes=3 * GRANULE)
    assert there(store, b"a", b"c", b"d") == [False, False, True]
