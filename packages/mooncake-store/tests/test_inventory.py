"""Catalogue, segments and eviction order together: nothing overlaps and no byte gets lost."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_store.allocator import BestFit
from mooncake_store.catalog import ObjectState
from mooncake_store.inventory import Inventory
from mooncake_store.placement import Segment, Use
from mooncake_store.protocol import Outcome

GRANULE = 4096


class InventoryMachine(RuleBasedStateMachine):
    """Reserves, commits, leases and drops at random, and checks the books after each step."""

    def __init__(self):
        super().__init__()
        self.inventory = Inventory(0.1)
        self.reserved, self.leased, self.segments = [], [], []

    @initialize(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def lend(self, sizes):
        for size in sizes:
            self.add_segment(size)

    @rule(granules=st.integers(1, 9))
    def add_segment(self, granules):
        self.segments.append(len(self.segments) + 1)
        free_space = BestFit(granules * GRANULE + 5, GRANULE)
        self.inventory.add_segment(Segment(self.segments[-1], self.segments[-1], b"", free_space))

    @precondition(lambda self: self.inventory.pool.segments)
    @rule(data=st.data())
    def drop_segment(self, data):
        self.inventory.drop_segment(data.draw(st.sampled_from(sorted(self.inventory.pool.segments))))

    @rule(
        key=st.binary(min_size=1, max_size=1), nbytes=st.integers(0, 12 * GRANULE), client=st.integers(1, 3)
    )
    def reserve(self, key, nbytes, client):
        before = self.inventory.room()
        entry = self.inventory.reserve(key, key, nbytes, client=client, avoid=())
        if entry is None:
            assert nbytes > before[1] + before[2] or self.inventory.room()[2] == 0
            return
        assert sum(extent.nbytes for extent in entry.extents) == nbytes
        assert len(entry.extents) <= 4
        self.reserved.append(entry)

    @precondition(lambda self: self.reserved)
    @rule(if_exists=st.sampled_from(["keep", "error", "replace"]), count=st.integers(1, 3))
    def commit(self, if_exists, count):
        entries, self.reserved = self.reserved[:count], self.reserved[count:]
        for entry, outcome in zip(entries, self.inventory.commit(entries, if_exists), strict=True):
            if entry.broken:
                assert outcome is Outcome.LOST
            elif if_exists == "replace":
                assert outcome is Outcome.STORED
            if outcome is Outcome.STORED and entry.state is ObjectState.COMMITTED:
                assert self.inventory.catalog.find(entry.digest) is entry

    @precondition(lambda self: self.reserved)
    @rule()
    def abandon(self):
        self.inventory.abandon(self.reserved.pop())

    @rule(key=st.binary(min_size=1, max_size=1))
    def lease_or_remove(self, key):
        entry = self.inventory.catalog.find(key)
        if entry is not None:
            self.inventory.lease(entry)
            self.inventory.touch([entry])
            self.leased.append(entry)
            if key > b"\x80":
                self.inventory.remove(entry)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def unlease(self, data):
        entry = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        # Whatever happened, the bytes of a leased value are still its own.
        assert entry in self.inventory.catalog.objects
        self.inventory.unlease(entry)

    @invariant()
    def nothing_overlaps_and_every_byte_is_booked(self):
        entries = self.inventory.catalog.objects
        for segment in self.inventory.pool.segments.values():
            space, by_use = segment.free_space, [0] * len(Use)
            taken = []
            for entry in entries:
                for extent in entry.extents:
                    if extent.segment == segment.id:
                        end = extent.offset + space.rounded(extent.nbytes)
                        taken.append((extent.offset, end))
                        by_use[entry.use] += end - extent.offset
            taken.sort()
            assert all(left[1] <= right[0] for left, right in itertools.pairwise(taken))
            assert not taken or taken[-1][1] <= space.capacity_bytes
            assert by_use == segment.used_bytes
            assert space.free_bytes + sum(by_use) == space.capacity_bytes

    @invariant()
    def everything_found_can_leave_in_some_order(self):
        clock = self.inventory.clock
        committed = [e for e in self.inventory.catalog.objects if e.state is ObjectState.COMMITTED]
        assert len(committed) == len(clock) == len(self.inventory.catalog)
        assert all(entry.version in clock for entry in committed)


TestInventory = InventoryMachine.TestCase
TestInventory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_giving_up_what_can_be_found_is_caught():
    inventory = Inventory(0.0)
    inventory.add_segment(Segment(1, 1, b"", BestFit(GRANULE, GRANULE)))
    entry = inventory.reserve(b"k", b"k", 10, client=1, avoid=())
    inventory.commit([entry], "keep")
    with pytest.raises(AssertionError, match="version 1 is"):
        inventory.abandon(entry)
    with pytest.raises(AssertionError, match="has no lease"):
        inventory.unlease(entry)
