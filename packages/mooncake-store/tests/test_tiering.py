"""What a master believes to be in tiers, and how it learns better."""

import random

import numpy as np
import pytest

from mooncake_store import protocol
from mooncake_store._core import TierRecords
from mooncake_store.config import StoreConfig
from mooncake_store.keys import object_digests
from mooncake_store.master.state import MasterState
from mooncake_store.protocol import Outcome, tiers

GRANULE = 4096
EPOCH = 5
CONFIG = StoreConfig(lease_ttl_s=10.0, reservation_ttl_s=7.0, evict_reserve_fraction=0.0)
OWNER, WRITER = 1, 2
MOST_BYTES = 80


def digest(key):
    return object_digests("", [key])


def packed(*rows):
    return np.array(rows, dtype="<u8").tobytes()


class Master:
    """A state with a clock, an owner of tiers that lends memory, and a writer."""

    def __init__(self):
        self.state = MasterState(EPOCH, CONFIG)
        self.now_s = 100.0
        for client, granules in ((OWNER, 16), (WRITER, 0)):
            self.join(client, granules)

    def join(self, client, granules):
        mount = protocol.Mount(client=client, nbytes=granules * GRANULE, descriptor=b"d", segment=client)
        self.state.handle(mount, client, f"host:{client}", self.now_s)

    def ask(self, client, request):
        request.epoch, request.client = EPOCH, client
        return self.state.handle(request, client, f"host:{client}", self.now_s)

    def mount(self, *names, shared=False, client=OWNER):
        request = tiers.MountTiers(address="host:1", tiers=[(name, shared) for name in names], touches=1)
        return self.ask(client, request).tiers

    def adopt(self, tier, *records, client=OWNER):
        """Records of key, epoch, version; which of them are taken."""
        request = tiers.AdoptRecords(
            tier=tier,
            digests=b"".join(digest(key) for key, *_ in records),
            numbers=packed(*((epoch, version, 100) for _, epoch, version in records)),
            tenants=[""] * len(records),
        )
        return list(self.ask(client, request).taken)

    def offloads(self, client=OWNER):
        return self.ask(client, tiers.TakeOffloads(most=100))

    def lost(self, tier, key, epoch, version):
        self.ask(
            OWNER,
            tiers.RecordsLost(tier=tier, digests=digest(key), numbers=packed((epoch, version, 0))),
        )

    def reserve(self, key, if_exists="replace"):
        return self.ask(
            WRITER,
            protocol.Reserve(
                digests=digest(key), keys=[key], sizes=packed(100), if_exists=if_exists, avoid=[]
            ),
        )

    def commit(self, reserved):
        request = protocol.Commit(
            reservation=reserved.reservation, failed=[], if_exists="replace", notices_seen=0
        )
        return list(self.ask(WRITER, request).outcomes)

    def put(self, key):
        assert self.commit(self.reserve(key)) == [Outcome.STORED]

    def exists(self, key):
        return bool(self.ask(WRITER, protocol.Exist(digests=digest(key))).found[0])

    def tiered(self, key):
        """(epoch, version) of the record that a reader is sent to."""
        located = self.ask(WRITER, protocol.Locate(digests=digest(key)))
        if located.lease:
            self.ask(WRITER, protocol.Release(lease=located.lease))
        if located.tiered is None:
            return None
        return tuple(np.frombuffer(located.tiered.rows, dtype="<u8")[2:4].tolist())

    def evict_all(self):
        """What is in memory leaves it."""
        request = protocol.Reserve(
            digests=digest(b"large"),
            keys=[b"large"],
            sizes=packed(16 * GRANULE),
            if_exists="replace",
            avoid=[],
        )
        self.commit(self.ask(WRITER, request))
        self.ask(WRITER, protocol.Remove(digests=digest(b"large")))


@pytest.fixture
def master():
    return Master()


def test_a_put_that_was_under_way_when_the_first_tier_came_makes_old_records_out_of_date(master):
    reserved = master.reserve(b"key")
    (tier,) = master.mount("tier")
    assert master.adopt(tier, (b"key", 1, 1)) == [1]
    assert master.commit(reserved) == [Outcome.STORED]
    assert master.offloads().drop == [(tier, digest(b"key"), 1, 1)]
    master.evict_all()
    assert master.tiered(b"key") is None
    assert not master.exists(b"key")


def test_a_put_that_is_renewed_for_long_makes_old_records_out_of_date(master):
    (tier,) = master.mount("tier")
    assert master.adopt(tier, (b"key", 1, 1)) == [1]
    master.offloads()
    reserved = master.reserve(b"key")
    for _ in range(6):
        master.now_s += CONFIG.reservation_ttl_s / 2
        for client in (OWNER, WRITER):
            master.ask(client, protocol.Heartbeat(leases=[], notices_seen=0))
        assert master.ask(WRITER, protocol.Renew(reservation=reserved.reservation)).found == b"\1"
        master.state.on_tick(master.now_s)
    assert master.commit(reserved) == [Outcome.STORED]
    master.evict_all()
    assert master.tiered(b"key") is None


def test_reservations_that_ended_are_forgotten(master):
    master.mount("tier")
    for number in range(10):
        master.reserve(b"%d" % number)
    (tiering,) = (group for group in master.state.context.groups if type(group).__name__ == "Tiering")
    assert len(tiering._placed) == 10
    master.now_s += 2 * CONFIG.reservation_ttl_s
    for _ in range(2):
        master.state.on_tick(master.now_s)
    assert not tiering._placed


def test_nobody_else_s_commit_takes_away_what_is_known_of_a_reservation(master):
    master.mount("tier")
    reserved = master.reserve(b"key")
    guess = protocol.Commit(reservation=reserved.reservation, failed=[], if_exists="replace", notices_seen=0)
    assert master.ask(OWNER, guess).outcomes == b""
    assert master.commit(reserved) == [Outcome.STORED]
    assert master.offloads().digests == digest(b"key")


def test_what_was_removed_since_it_was_read_leaves_no_ticket_behind(master):
    master.mount("tier")
    (tiering,) = (group for group in master.state.context.groups if type(group).__name__ == "Tiering")
    master.put(b"key")
    master.ask(WRITER, protocol.Remove(digests=digest(b"key")))
    tiering._admit(digest(b"key"), OWNER, 2, master.now_s)  # as a read of before the removal is told late
    assert not tiering._tickets


@pytest.mark.parametrize("named", [(0, -1), (0, 1 << 64), (7, 1), (-1, 1)])
def test_a_release_that_condemns_what_there_is_not_ends_its_lease(master, named):
    master.put(b"key")
    located = master.ask(WRITER, protocol.Locate(digests=digest(b"key")))
    released = master.ask(WRITER, protocol.Release(lease=located.lease, condemned=[named]))
    assert (released.expired, released.broken) == (False, [])
    assert master.exists(b"key")
    assert master.state.stats().leases == 0
    master.evict_all()  # nothing holds it
    assert not master.exists(b"key")


def test_what_a_tier_does_not_name_when_it_comes_again_is_not_there(master):
    (tier,) = master.mount("tier")
    assert master.adopt(tier, (b"stays", 1, 1), (b"goes", 1, 2)) == [1, 1]
    master.offloads()
    assert master.exists(b"goes")
    assert list(master.reserve(b"goes", "error").outcomes) == [Outcome.EXISTS]
    assert master.mount("tier") == [tier]
    assert master.adopt(tier, (b"stays", 1, 1)) == [1]
    assert master.exists(b"goes")  # it may be on the next page
    master.offloads()
    assert (master.exists(b"stays"), master.exists(b"goes")) == (True, False)
    assert list(master.reserve(b"goes", "error").outcomes) == [Outcome.PLACED]


def test_what_one_owner_of_a_shared_tier_does_not_name_stays(master):
    master.join(3, 0)
    (tier,) = master.mount("tier", shared=True)
    assert master.adopt(tier, (b"key", 1, 1)) == [1]
    master.offloads()
    assert master.mount("tier", shared=True, client=3) == [tier]
    master.offloads(client=3)
    assert master.tiered(b"key") == (1, 1)


def test_a_lost_record_is_one_exact_version_of_one_tier(master):
    first, second = master.mount("first", "second")
    assert master.adopt(first, (b"key", 1, 7)) == [1]
    assert master.adopt(second, (b"key", 1, 7)) == [1]
    for tier, version in ((first, 6), (first, 8), (second + 1, 7)):
        master.lost(tier, b"key", 1, version)
    master.lost(first, b"key", 2, 7)
    assert master.exists(b"key")
    master.lost(first, b"key", 1, 7)
    assert master.exists(b"key")
    master.lost(second, b"key", 1, 7)
    assert not master.exists(b"key")
    master.put(b"key")


def test_many_records_that_are_not_there_go_a_part_at_a_time(master, monkeypatch):
    monkeypatch.setattr("mooncake_store.master.tiering.PURGED_AT_ONCE", 2)
    numbers = master.mount("first", "second")
    keys = [b"%d" % n for n in range(5)]
    for tier in numbers:
        assert master.adopt(tier, *((key, 1, 1) for key in keys)) == [1] * 5
    for _ in range(10):
        master.offloads()
    assert all(map(master.exists, keys))
    assert master.mount("first", "second") == numbers
    for _ in range(10):
        master.offloads()
    assert not any(map(master.exists, keys))


@pytest.mark.parametrize("younger_first", [True, False])
def test_of_two_tiers_the_one_with_the_younger_version_is_believed(master, younger_first):
    old, new = master.mount("old", "new")
    both = [(old, 1), (new, 2)]
    taken = [
        master.adopt(tier, (b"key", 1, version)) for tier, version in both[:: -1 if younger_first else 1]
    ]
    assert taken == ([[1], [0]] if younger_first else [[1], [1]])
    assert master.tiered(b"key") == (1, 2)
    assert master.offloads().drop == ([] if younger_first else [(old, digest(b"key"), 1, 1)])


def test_who_got_no_answer_says_again_what_it_wrote(master):
    (tier,) = master.mount("tier")
    master.offloads()
    master.put(b"key")
    offloads = master.offloads()
    (version,) = np.frombuffer(offloads.versions, dtype="<u8").tolist()
    for _ in range(2):
        said = tiers.Offloaded(
            tier=tier, digests=digest(b"key"), numbers=packed((EPOCH, version, 100)), done=b""
        )
        assert master.ask(OWNER, said).taken == b"\1"
    master.lost(tier, b"key", EPOCH, version)
    master.evict_all()
    assert not master.exists(b"key")


# ---- the records themselves


class Checked:
    """Records, and the same by a dictionary."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.records = TierRecords()
        self.model = {}  # (digest, tier): epoch, version, bytes, tenant, round
        self.digests = [self.chance.randbytes(16) for _ in range(40)]

    def of(self, digest):
        return sorted((tier, *rest[:3]) for (d, tier), rest in self.model.items() if d == digest)

    def one(self):
        chance = self.chance
        return (chance.randint(1, 2), chance.randint(1, 2), chance.randint(0, 1 << 40))

    def enter(self, key, tier, round):
        if (key, tier) in self.model:
            return
        where, tenant = self.one(), self.chance.choice([None, "a", "b"])
        self.records.enter(key, (tier, *where), tenant, round)
        self.model[key, tier] = (*where, tenant, round)

    def name(self, key, tier, round):
        there = self.model.get((key, tier))
        named = there[:3] if there and self.chance.random() < 0.7 else self.one()
        good = there is not None and there[:3] == named
        assert self.records.name(key, (tier, *named), round) == good
        if good:
            self.model[key, tier] = (*there[:4], round)

    def forget(self, key, tier, round):
        assert sorted(self.records.forget(key)) == self.of(key)
        for tier in (1, 2, 3):
            self.model.pop((key, tier), None)

    def lose(self, key, tier, round):
        epoch, version, _ = self.one()
        good = self.model.get((key, tier), ())[:2] == (epoch, version)
        assert self.records.lose(key, tier, epoch, version) == good
        if good:
            del self.model[key, tier]

    def purge(self, key, tier, round):
        if self.chance.random() > 0.1:
            return
        gone = [at for at, one in self.model.items() if at[1] == tier and one[4] != round]
        first, count, most = 0, 0, self.chance.choice([7, 100, 1 << 20])
        while first is not None:
            some, first = self.records.purge(tier, round, first, most)
            count += some
        assert count == len(gone)
        for at in gone:
            del self.model[at]

    def ask(self, key, tier, round):
        chance, everything = self.chance, b"".join(self.digests)
        able = chance.sample([1, 2, 3, 4], chance.randint(0, 4))
        first = [
            next((one for tier in able for one in self.of(d) if one[0] == tier), None) for d in self.digests
        ]
        assert self.records.reachable(everything, able) == bytes(one is not None for one in first)
        skip = bytes(chance.randint(0, 1) for _ in self.digests)
        rows = [(i, *one) for i, one in enumerate(first) if one is not None and not skip[i]]
        assert self.records.rows(everything, skip, able) == packed(*rows)

    def ask_of_tenants(self, key, tier, round):
        for name in ("a", "nobody"):
            tenants = {d: {one[3] for at, one in self.model.items() if at[0] == d} for d in self.digests}
            told = self.records.of_tenant(name)
            mine = {d for d in self.digests if tenants[d] & {None, name}}
            assert {told[i : i + 16] for i in range(0, len(told), 16)} == mine
            owned = [d if not tenants[d] or name in tenants[d] else bytes(16) for d in self.digests]
            assert self.records.own(b"".join(self.digests), name) == b"".join(owned)

    def check(self, key, tier):
        assert self.records.find(key) == self.of(key)
        assert (key in self.records) == bool(self.of(key))
        assert len(self.records) == len(self.model)
        of_tier = [one for at, one in self.model.items() if at[1] == tier]
        assert self.records.count(tier) == (len(of_tier), sum(one[2] for one in of_tier))


@pytest.mark.parametrize("seed", range(5))
def test_records_are_what_a_model_says(seed):
    checked = Checked(seed)
    calls = [checked.enter, checked.name, checked.forget, checked.lose, checked.purge]
    calls += [checked.enter, checked.ask, checked.ask_of_tenants]
    for _ in range(4000):
        key, tier = checked.chance.choice(checked.digests), checked.chance.randint(1, 3)
        checked.chance.choice(calls)(key, tier, checked.chance.randint(0, 2))
        checked.check(key, tier)


def test_a_million_records_take_less_than_eighty_bytes_each():
    records, chance = TierRecords(), random.Random(1)
    for number in range(1_000_000):
        records.enter(chance.randbytes(16), (1, 1 << 60, number, 1 << 20), "tenant", 1)
    assert len(records) == 1_000_000
    assert records.nbytes / len(records) < MOST_BYTES
    assert records.purge(1, 2) == (1_000_000, None)
    assert records.count(1) == (0, 0)


@pytest.mark.parametrize("where", [(0, 1, 1, 1), (1 << 16, 1, 1, 1)])
def test_a_tier_of_no_possible_number_is_refused(where):
    with pytest.raises(ValueError, match="no tier of number"):
        TierRecords().enter(bytes(16), where, None, 0)


def test_bytes_that_are_no_digest_are_refused():
    with pytest.raises(ValueError, match="not a multiple of 16"):
        TierRecords().find(b"short")
    with pytest.raises(ValueError, match="16 bytes"):
        TierRecords().find(bytes(32))
