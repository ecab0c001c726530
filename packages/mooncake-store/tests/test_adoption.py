"""What a new master takes over from the ledgers of owners."""

import itertools

import numpy as np
import pytest

from mooncake_store._core import Ledger, ObjectMap, PutOptions
from mooncake_store.protocol import Outcome

GRANULE, SEGMENT = 4096, 64 * 4096
A, B = 1, 2  # members, who lend the segments 100 + their number


def digest(key):
    return key.ljust(16, b".")


class Owners:
    """A map with two owners, whose ledgers take what it tells them."""

    def __init__(self):
        self.map = ObjectMap(GRANULE, 0.0, "clock")
        self.ledgers = {A: Ledger(), B: Ledger()}
        self.told = []
        for owner in (A, B):
            self.map.add_member(owner)
            self.lend(owner)

    def lend(self, owner, *, closed=False):
        self.map.add_segment(100 + owner, owner, 0, SEGMENT, True)
        self.map.open_segment(100 + owner, not closed)

    def put(self, key, nbytes, *, replace=False, **options):
        group = options.pop("group", "")
        put = PutOptions(writer=99, replace=replace, **options)
        put.group = group
        outcomes, slots, *_ = self.map.reserve(digest(key), nbytes.to_bytes(8, "little"), put)
        if not slots:
            return Outcome(outcomes[0])
        return Outcome(self.map.commit(slots, [], [key], replace, 0.0)[0])

    def tell(self, *owners):
        for owner in owners:
            for first, frames in self.map.records(owner, 1 << 30):
                self.told += [key for _, key, _ in self.ledgers[owner].take(first, frames)]
            self.map.confirm(owner, self.ledgers[owner].seen)

    def fail_over(self, *owners, first_version=1):
        """A new map, and what it made of these owners' ledgers: adopted, waiting and refused."""
        self.map = ObjectMap(GRANULE, 0.0, "clock", first_version)
        return np.sum([self.come(owner) for owner in owners], axis=0).tolist()

    def come(self, owner):
        self.map.add_member(owner)
        self.map.start_above(self.ledgers[owner].last_version)
        self.lend(owner, closed=True)
        self.ledgers[owner].restart(True)
        parts = itertools.takewhile(bool, (self.ledgers[owner].part(number) for number in itertools.count()))
        counts = [self.map.adopt(100 + owner, part, 0.0) for part in parts]
        self.map.open_segment(100 + owner, True)
        return np.sum([(0, 0, 0), *counts], axis=0).tolist()

    def where(self, key):
        """The extents of a key: segment, offset, bytes and replica of each."""
        found = [set(e[-1]) for e in self.map.describe() if e[1] == digest(key) and e[3] == "committed"]
        return found[0] if found else set()

    def segments(self, key):
        return {extent[0] for extent in self.where(key)}

    def free_bytes(self):
        return self.map.room()[1]


@pytest.fixture
def owners():
    return Owners()


def test_what_the_owners_know_is_found_where_it_lay(owners):
    keys = [b"key-%d" % number for number in range(20)]
    for number, key in enumerate(keys):
        assert owners.put(key, 1 + number * 1000, priority=number % 3) is Outcome.STORED
    before, free = {key: owners.where(key) for key in keys}, owners.free_bytes()
    owners.tell(A, B)
    assert owners.fail_over(A, B) == [20, 0, 0]
    assert {key: owners.where(key) for key in keys} == before
    assert owners.free_bytes() == free
    assert owners.put(b"key-3", 5) is Outcome.EXISTS
    assert owners.put(b"new", 3 * GRANULE) is Outcome.STORED
    taken = [extent for key in [*keys, b"new"] for extent in owners.where(key)]
    granules = [(e[0], e[1] // GRANULE + i) for e in taken for i in range(-(-e[2] // GRANULE))]
    assert len(granules) == len(set(granules))


def test_what_no_owner_was_told_of_is_missing_and_its_room_free(owners):
    owners.put(b"told", 100)
    owners.tell(A, B)
    owners.put(b"untold", 100)
    assert owners.fail_over(A, B) == [1, 0, 0]
    assert owners.where(b"untold") == set()
    assert owners.free_bytes() == 2 * SEGMENT - GRANULE


def test_room_of_what_is_refused_is_used_again_only_when_its_owner_has_confirmed(owners):
    owners.put(b"key", SEGMENT - GRANULE)
    owners.tell(A, B)
    (old,) = owners.segments(b"key")
    behind, ahead = (A, B) if old == 100 + A else (B, A)
    owners.put(b"key", 3 * GRANULE, replace=True, preferred=[100 + ahead])
    owners.tell(ahead)
    assert owners.fail_over(ahead, behind) == [1, 0, 1]
    # The owner's ledger still says that the old value lies there, and the next master would believe it.
    assert owners.put(b"new", 2 * GRANULE, avoid=[100 + ahead]) is Outcome.FULL
    owners.tell(behind)
    assert owners.put(b"new", 2 * GRANULE, avoid=[100 + ahead]) is Outcome.STORED


@pytest.mark.parametrize("evicts_own", [True, False])
def test_a_quota_holds_whatever_ledgers_have(owners, evicts_own):
    for number in range(4):
        owners.put(b"%d" % number, GRANULE, tenant=owners.map.tenant("limited"))
    owners.tell(A, B)
    owners.map = ObjectMap(GRANULE, 0.0, "clock")
    limited = owners.map.tenant("limited")
    owners.map.limit_tenant(limited, 2 * GRANULE, evicts_own)
    came = [owners.come(owner) for owner in (A, B)]
    assert np.sum(came, axis=0).tolist() == ([4, 0, 0] if evicts_own else [2, 0, 2])
    assert owners.map.tenant_bytes(limited) == 2 * GRANULE


def test_a_replica_counts_on_the_word_of_its_owner_only(owners):
    owners.put(b"two", 100, replicas=2)
    owners.tell(A, B)
    assert owners.segments(b"two") == {100 + A, 100 + B}
    assert owners.fail_over(A) == [1, 0, 0]
    assert owners.segments(b"two") == {100 + A}
    owners.come(B)
    assert owners.segments(b"two") == {100 + A, 100 + B}
    assert owners.free_bytes() == 2 * (SEGMENT - GRANULE)


def test_a_group_leaves_together_after_its_owner_went_and_came_back(owners):
    grouped = {"group": "g", "preferred": [100 + A]}
    owners.put(b"mine", GRANULE, **grouped)
    owners.put(b"theirs", GRANULE, **{**grouped, "preferred": [100 + B]})
    owners.tell(A, B)
    owners.fail_over(A, B)
    owners.map.drop_segment(100 + A)
    owners.map.drop_member(A)
    assert owners.come(A) == [1, 0, 0]
    assert owners.put(b"large", 2 * SEGMENT - 3 * GRANULE) is Outcome.STORED
    assert owners.put(b"larger", 3 * GRANULE) is Outcome.FULL  # until the owners know what has gone
    owners.tell(A, B)
    assert owners.segments(b"mine") == owners.segments(b"theirs") == set()


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_replicas_stay_what_they_are_whichever_comes_first(owners, order):
    owners.put(b"two", 100, replicas=2)
    owners.tell(A, B)
    before = owners.where(b"two")
    assert {extent[3] for extent in before} == {0, 1}
    assert owners.fail_over(*order) == [1, 0, 0]
    assert owners.where(b"two") == before


def test_a_value_across_two_owners_waits_for_both_and_in_the_end_for_none(owners):
    owners.put(b"wide", SEGMENT + 8 * GRANULE)
    owners.tell(A, B)
    before = owners.where(b"wide")
    assert {extent[0] for extent in before} == {100 + A, 100 + B}
    assert owners.fail_over(A, B) == [1, 1, 0]
    assert owners.where(b"wide") == before
    assert owners.fail_over(A) == [0, 1, 0]
    assert owners.free_bytes() < SEGMENT
    owners.map.end_adoption()
    owners.tell(A)
    assert owners.free_bytes() == SEGMENT
    owners.tell(A)
    assert len(owners.ledgers[A]) == 0
    assert owners.told == [b"wide"]


def test_an_owner_that_was_not_told_in_time_does_not_bring_back_another_s_room(owners):
    owners.put(b"wide", SEGMENT + 8 * GRANULE)
    owners.tell(A, B)
    owners.map.remove(digest(b"wide"))
    owners.tell(B)
    assert owners.put(b"other", 20 * GRANULE, preferred=[100 + B]) is Outcome.STORED
    owners.tell(B)
    assert owners.fail_over(A, B) == [1, 1, 0]  # A still believes in its part
    assert owners.where(b"wide") == set()
    assert owners.segments(b"other") == {100 + B}


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_of_two_values_of_a_key_the_later_one_stands(owners, order):
    owners.put(b"k", 100, preferred=[100 + A])
    owners.tell(A)
    owners.put(b"k", 200, preferred=[100 + B], replace=True)
    owners.tell(B)
    later = owners.where(b"k")
    owners.fail_over(*order)
    assert owners.where(b"k") == later
    owners.tell(A, B)
    assert (len(owners.ledgers[A]), len(owners.ledgers[B])) == (0, 1)


def test_a_value_put_since_is_not_replaced_by_an_old_one(owners):
    owners.put(b"k", 100, preferred=[100 + A])
    owners.tell(A, B)
    owners.fail_over(B, first_version=1 << 28)
    assert owners.put(b"k", 300) is Outcome.STORED
    assert owners.come(A) == [0, 0, 1]
    assert owners.segments(b"k") == {100 + B}
    owners.tell(A)
    assert owners.told == [b"k"]
    assert owners.free_bytes() == 2 * SEGMENT - GRANULE


def with_a_key_of_b(owners):
    """A key that lies with B, which the next map does not know yet; A is there."""
    assert owners.put(b"key", 5000, preferred=[100 + B]) is Outcome.STORED
    owners.tell(A, B)
    owners.fail_over(first_version=1 << 28)
    owners.map.await_ledgers()
    owners.come(A)


def test_what_was_removed_before_its_owner_came_stays_removed(owners):
    with_a_key_of_b(owners)
    assert owners.map.remove(digest(b"key")) == b"\0"
    assert owners.come(B) == [0, 0, 1]
    assert not owners.where(b"key")


def test_all_of_a_tenant_that_was_removed_before_its_owner_came_stays_removed(owners):
    with_a_key_of_b(owners)
    owners.map.remove_tenant(0)
    assert owners.come(B) == [0, 0, 1]


def test_an_older_value_does_not_come_back_when_the_younger_one_was_evicted(owners):
    with_a_key_of_b(owners)
    assert owners.put(b"key", 6000) is Outcome.STORED
    owners.put(b"large", SEGMENT)  # it finds its room when the owner has confirmed what left for it
    assert not owners.where(b"key")
    assert owners.come(B) == [0, 0, 1]


def test_who_comes_after_the_time_of_late_ledgers_is_believed(owners):
    with_a_key_of_b(owners)
    owners.map.remove(digest(b"key"))
    owners.map.end_ledgers()
    assert owners.come(B) == [1, 0, 0]


def test_more_that_has_left_than_is_remembered_costs_values_and_brings_none_back(owners):
    with_a_key_of_b(owners)
    owners.map.remove(b"".join(number.to_bytes(16, "little") for number in range((1 << 20) + 1)))
    assert owners.put(b"new", 5000) is Outcome.STORED
    owners.map.remove(digest(b"key"))
    assert owners.come(B) == [0, 0, 1]
    assert owners.where(b"new")


def test_versions_of_a_new_map_are_above_those_of_every_ledger(owners):
    for number in range(5):
        owners.put(b"key-%d" % number, 10)
    owners.tell(A, B)
    owners.fail_over(A, B)
    owners.put(b"new", 10)
    versions = {entry[1]: entry[0] for entry in owners.map.describe()}
    assert max(versions.values()) == versions[digest(b"new")]
    assert len(set(versions.values())) == 6


def test_pins_and_tenants_come_along(owners):
    put = PutOptions(writer=99, tenant=owners.map.tenant("team"), priority=3, hard_pin=True)
    put.group = "g"
    _, slots, *_ = owners.map.reserve(digest(b"p"), (100).to_bytes(8, "little"), put)
    owners.map.commit(slots, [], [b"p"], False, 0.0)
    owners.tell(A, B)
    owners.fail_over(A, B)
    assert owners.map.tenant_bytes(owners.map.tenant("team")) == GRANULE
    assert owners.map.room()[5] == GRANULE
    assert owners.map.remove_tenant(owners.map.tenant("team")) == 1


def test_bytes_that_are_no_records_are_refused(owners):
    for nonsense in (b"nonsense", bytes(32), b"\xff" * 40):
        with pytest.raises(ValueError, match="no records"):
            owners.map.adopt(100 + A, nonsense, 0.0)
    with pytest.raises(ValueError, match="no such segment"):
        owners.map.adopt(5, b"", 0.0)
