"""Seeded random clients, some of them dying, against the master's state and a model of the memory they share.

Owners fence in every second store: there, writers go on writing after their deadline as long as their key is
good.

What must hold whatever happens: a read that the master lets stand has the bytes of exactly the version it
located, no two values share a byte, every byte is booked once, and, where another master may take over, the
ledger of an owner never names bytes that anything else was written to.
"""

import random

import msgspec
import numpy as np
import pytest

from mooncake_store import protocol
from mooncake_store._core import Ledger, read_records
from mooncake_store.config import StoreConfig
from mooncake_store.keys import object_digests
from mooncake_store.master.state import MasterState
from mooncake_store.protocol import Outcome

GRANULE = 4096
EPOCH = 77
KEYS = [b"a", b"b", b"c", b"d", b"e", b"f"]
SIZES = [0, 1, GRANULE, 2 * GRANULE - 7, 2 * GRANULE, 3 * GRANULE, 9 * GRANULE]
LENT = {1: 5, 2: 4, 3: 0}
CONFIG = StoreConfig(lease_ttl_s=10.0, reservation_ttl_s=7.0, evict_reserve_fraction=0.1, client_ttl_s=1e9)
GARBAGE = "what is written after the memory went back to the system"
STEPS = 500


def digests(keys):
    return object_digests("", keys)


def rows_of(placement):
    return np.frombuffer(placement.rows, dtype="<u8").reshape(-1, 5).tolist()


def granules_of(offset, nbytes):
    return range(offset // GRANULE, -(-(offset + nbytes) // GRANULE))


class Put:
    """A batch between its reservation and its end. Its writer may write until the deadline, dead or alive;
    where there are fences, for as long as its access keys are good.
    """

    def __init__(self, client, keys, if_exists, reply, deadline_s):
        self.client, self.keys, self.if_exists = client, keys, if_exists
        self.reservation, self.deadline_s = reply.reservation, deadline_s
        self.outcomes = list(reply.outcomes)
        self.rows, self.descriptors = rows_of(reply.placement), reply.placement.segments
        self.tokens = [object() for _ in keys]


class World:
    """Memory is a stamp per granule: the token of the value that was last written there."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.recovery, self.fences = seed % 2 == 1, seed % 4 >= 2
        self.good_keys, self.fencing, self.last_key = {}, {}, 0
        self.late_writes = 0
        self.state = MasterState(EPOCH, msgspec.structs.replace(CONFIG, recovery=self.recovery))
        self.map = self.state.context.map
        self.last_segment = 0
        self.ledgers, self.token_of = {}, {}
        self.now_s = 0.0
        self.memory = {}
        self.segment_of = {}
        self.connections = {}
        self.last_connection = 0
        self.puts, self.zombies, self.reads = [], [], []
        self.visible = {}
        self.good_reads = self.thrown_reads = 0
        for client in LENT:
            self.mount(client)

    def run(self):
        steps = {
            self.reserve: 10,
            self.commit: 10,
            self.zombie_writes: 4,
            self.locate: 10,
            self.read_and_release: 8,
            self.remove: 1,
            self.lose: 1,
            self.beat: 2,
            self.fence: 2 * self.fences,
            self.time_goes_by: 3,
        }
        for step in self.random.choices(list(steps), list(steps.values()), k=STEPS):
            step()
            self.check_books()

    def some_keys(self):
        return self.random.choices(KEYS, k=self.random.randint(1, 3))

    def any_client(self):
        return self.random.choice(list(LENT))

    def pop(self, things):
        return things.pop(self.random.randrange(len(things))) if things else None

    def ask(self, client, request):
        request.epoch, request.client = EPOCH, client
        reply = self.state.handle(request, self.connections.get(client, 0), "", self.now_s)
        return None if isinstance(reply, protocol.Stale) else reply

    def mount(self, client):
        self.last_connection += 1
        self.connections[client] = self.last_connection
        self.end_standing(client)
        self.last_segment += 1
        request = protocol.Mount(
            client=client,
            nbytes=LENT[client] * GRANULE,
            descriptor=self.new_key(),
            segment=1000 + self.last_segment,
            minors=(0, 3 if self.fences else 2),
        )
        self.ledgers[client] = Ledger()
        reply = self.state.handle(request, self.last_connection, "", self.now_s)
        if reply.segment:
            self.memory[reply.segment] = [None] * LENT[client]
            self.segment_of[client] = reply.segment
            self.good_keys[reply.segment] = {request.descriptor}

    def new_key(self):
        self.last_key += 1
        return b"key %d" % self.last_key

    def lose(self):
        client = self.any_client()
        if self.random.random() < 0.5:
            self.mount(client)  # it comes back before the loss of its old connection is noticed
        elif client in self.connections:
            self.state.on_connection_lost(self.connections.pop(client))
            self.end_standing(client)
        else:
            self.mount(client)

    def end_standing(self, client):
        self.zombies += [(put, put.rows) for put in self.puts if put.client == client]
        self.puts = [put for put in self.puts if put.client != client]
        self.fencing.pop(client, None)
        lost = self.segment_of.pop(client, None)
        if lost is not None:
            self.memory[lost] = [GARBAGE] * len(self.memory[lost])

    def reserve(self):
        client, keys = self.any_client(), self.some_keys()
        if_exists, size = self.random.choice(["error", "keep", "replace"]), self.random.choice(SIZES)
        avoid = [self.random.choice(list(self.memory))] if self.random.random() < 0.1 else []
        request = protocol.Reserve(
            digests=digests(keys),
            keys=keys,
            sizes=np.full(len(keys), size, dtype="<u8").tobytes(),
            if_exists=if_exists,
            avoid=avoid,
        )
        reply = self.ask(client, request)
        assert (reply is None) == (client not in self.connections)
        if reply is None:
            return
        put = Put(client, keys, if_exists, reply, self.now_s + CONFIG.reservation_ttl_s)
        assert all(row[2] not in avoid for row in put.rows)
        for position, outcome in enumerate(put.outcomes):
            placed = sum(row[4] for row in put.rows if row[0] == position)
            assert placed == (size if outcome == Outcome.PLACED else 0)
            assert if_exists != "replace" or outcome != Outcome.EXISTS
        assert (reply.room is not None) == (Outcome.FULL in put.outcomes)
        if reply.room is not None and len(keys) == 1 and not avoid:
            self.check_refusal(size, reply)
        if reply.reservation:
            self.puts.append(put)

    def check_refusal(self, size, reply):
        _, free, evictable, leased, reserved = reply.room
        retiring = self.state.stats().retiring_bytes
        assert reply.wait == (leased + reserved + retiring > 0)
        # Nothing is refused while evicting makes room: too little in all, or free in too many pieces.
        assert size > free + evictable or evictable == 0 or retiring > 0

    def write(self, put, rows):
        for position, _, segment, offset, nbytes in rows:
            if segment in self.segment_of.values() and put.descriptors[segment] in self.good_keys[segment]:
                self.late_writes += self.now_s >= put.deadline_s
                for granule in granules_of(offset, nbytes):
                    self.memory[segment][granule] = put.tokens[position]

    def commit(self):
        put = self.pop(self.puts)
        if put is None:
            return
        placed = [i for i, outcome in enumerate(put.outcomes) if outcome == Outcome.PLACED]
        failed = [number for number in range(len(placed)) if self.random.random() < 0.1]
        if self.now_s < put.deadline_s:
            self.write(put, put.rows)
        request = protocol.Commit(
            reservation=put.reservation,
            failed=failed,
            if_exists=put.if_exists,
            notices_seen=self.ledgers[put.client].seen,
        )
        reply = self.ask(put.client, request)
        self.take(put.client, reply.notices)
        given_up = {placed[number] for number in failed}
        self.zombies.append((put, [row for row in put.rows if row[0] in given_up]))
        if not reply.outcomes:
            assert self.now_s >= put.deadline_s
        for number, outcome in enumerate(reply.outcomes):
            key, token = put.keys[placed[number]], put.tokens[placed[number]]
            assert (outcome == Outcome.FAILED) == (number in failed)
            assert outcome in (Outcome.FAILED, Outcome.STORED, Outcome.EXISTS, Outcome.LOST)
            assert outcome != Outcome.EXISTS or put.if_exists != "replace"
            if outcome == Outcome.STORED:
                self.visible[key] = token
        self.learn_versions()

    def learn_versions(self):
        token_of_digest = {digests([key]): token for key, token in self.visible.items()}
        for version, digest, _, state, *_ in self.map.describe():
            if state == "committed":
                self.token_of.setdefault(version, token_of_digest[digest])

    def take(self, client, pages):
        for first, frames in pages:
            self.ledgers[client].take(first, frames)

    def zombie_writes(self):
        late = self.fences
        self.zombies = [(put, rows) for put, rows in self.zombies if late or self.now_s < put.deadline_s]
        for put, rows in self.zombies:
            self.write(put, rows)

    def locate(self):
        client, keys = self.any_client(), self.some_keys()
        reply = self.ask(client, protocol.Locate(digests=digests(keys)))
        assert (reply is None) == (client not in self.connections)
        if reply is None:
            return
        found = [i for i in range(len(keys)) if reply.found[i]]
        assert (reply.lease != 0) == bool(found)
        expected = {i: self.visible[keys[i]] for i in found}
        if found:
            self.reads.append((client, reply.lease, expected, rows_of(reply.placement), found))

    def read_and_release(self):
        read = self.pop(self.reads)
        if read is None:
            return
        client, lease, expected, rows, found = read
        stamps = {i: set() for i in found}
        for position, _, segment, offset, nbytes in rows:
            stamps[position].update(self.memory[segment][granule] for granule in granules_of(offset, nbytes))
        reply = self.ask(client, protocol.Release(lease=lease))
        for number, position in enumerate(found):
            if reply is None or reply.expired or number in reply.broken:
                self.thrown_reads += 1
            else:
                self.good_reads += 1
                assert stamps[position] <= {expected[position]}

    def remove(self):
        client, key = self.any_client(), self.random.choice(KEYS)
        reply = self.ask(client, protocol.Remove(digests=digests([key])))
        if reply is not None:
            assert self.ask(client, protocol.Exist(digests=digests([key]))).found == b"\0"
            if reply.found[0]:
                del self.visible[key]

    def beat(self):
        client = self.any_client()
        held = [read[1] for read in self.reads if read[0] == client]
        seen = self.ledgers[client].seen
        reply = self.ask(client, protocol.Heartbeat(leases=held, notices_seen=seen))
        if reply is not None:
            assert set(reply.segments) == set(self.segment_of.values())
            if self.random.random() < 0.7:  # else the answer is lost
                self.take(client, reply.notices)
                if reply.fence:
                    self.begin_fence(client)

    def begin_fence(self, client):
        assert self.fences
        good = self.good_keys[self.segment_of[client]]
        if client not in self.fencing:
            (previous,), new = good, self.new_key()
            good.add(new)
            self.fencing[client] = (previous, new, self.now_s)
        previous, new, _ = self.fencing[client]
        self.ask(client, protocol.Regrant(previous=previous, descriptor=new))

    def fence(self):
        if self.fencing:
            client = self.random.choice(list(self.fencing))
            previous, new, since_s = self.fencing[client]
            # Reservations of before have ended, so who writes under the old key is late.
            if self.now_s >= since_s + CONFIG.reservation_ttl_s:
                del self.fencing[client]
                self.good_keys[self.segment_of[client]].remove(previous)
                self.ask(client, protocol.Fenced(descriptor=new))

    def time_goes_by(self):
        self.now_s += self.random.choice([0.5, 1.0, 3.0, 8.0])
        self.state.on_tick(self.now_s)

    def check_books(self):
        stats = self.state.stats()
        assert stats.capacity_bytes == stats.used_bytes + stats.reserved_bytes + stats.free_bytes
        assert stats.clients == len(self.connections)
        assert self.recovery or not stats.retiring_bytes
        taken, booked = set(), {"reserved": 0, "read": 0, "there": 0}
        for _, _, nbytes, state, leases, broken, _, extents in self.map.describe():
            assert broken or sum(extent[2] for extent in extents) == nbytes
            use = state if state == "reserved" else "read" if leases or state == "hidden" else "there"
            for segment, offset, length, _ in extents:
                assert segment in self.segment_of.values()
                granules = {(segment, granule) for granule in granules_of(offset, length)}
                assert not taken & granules
                taken |= granules
                booked[use] += len(granules) * GRANULE
        _, free, evictable, leased, reserved, kept, retiring = self.map.room()
        assert booked == {"reserved": reserved, "read": leased, "there": evictable + kept}
        assert free + sum(booked.values()) + retiring == stats.capacity_bytes
        if self.recovery:
            self.check_ledgers()

    def check_ledgers(self):
        for client, segment in self.segment_of.items():
            number, ledger = 0, self.ledgers[client]
            while (part := ledger.part(number)) is not None:
                number += 1
                for _, _, version, *_, extents in read_records(part):
                    for where, offset, nbytes, _ in extents:
                        if where == segment:
                            stamps = {self.memory[where][granule] for granule in granules_of(offset, nbytes)}
                            assert stamps <= {self.token_of[version]}, f"version {version} was written over"

    def check_that_nothing_leaks(self):
        for client in LENT:
            if client not in self.connections:
                self.mount(client)
        self.ask(1, protocol.Remove(digests=digests(KEYS)))
        self.now_s += 100.0
        self.state.on_tick(self.now_s)
        for _ in range(2 if self.fences else 0):  # one may be under way that began too early
            for client in self.segment_of:
                if self.ask(client, protocol.Heartbeat(leases=[], notices_seen=0)).fence:
                    self.begin_fence(client)
            self.now_s += CONFIG.reservation_ttl_s
            while self.fencing:
                self.fence()
        assert len(self.state.context.fences) == 0
        for client in LENT:
            for _ in range(2):
                seen = self.ledgers[client].seen
                reply = self.ask(client, protocol.Heartbeat(leases=[], notices_seen=seen))
                self.take(client, reply.notices)
            assert len(self.ledgers[client]) == 0
        stats = self.state.stats()
        assert stats.free_bytes == stats.capacity_bytes == 9 * GRANULE
        assert self.map.describe() == []
        assert (stats.leases, stats.reservations) == (0, 0)


@pytest.mark.parametrize("block", range(10))
def test_no_read_that_stands_has_bytes_of_another_version_whatever_dies(block):
    seen = {"good": 0, "thrown": 0, "evicted": 0, "lost": 0, "removed": 0, "late": 0}
    for seed in range(10 * block, 10 * block + 10):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        world.check_that_nothing_leaks()
        stats = world.state.stats()
        seen["good"] += world.good_reads
        seen["thrown"] += world.thrown_reads
        seen["late"] += world.late_writes
        for name in ("evicted", "lost", "removed"):
            seen[name] += getattr(stats, name)
    # The simulation means something only if all of this really happens in it.
    assert min(seen.values()) > 20, seen
