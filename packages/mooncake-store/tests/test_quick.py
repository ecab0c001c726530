"""Usual gets and puts of one value need no Python on their way, and come to the same as those that do."""

import random
import struct
import threading

import numpy as np
import pytest

from mooncake_store import StoreConfig, errors, membership
from mooncake_store._core import Quick, value_sums
from mooncake_store.mover import Mover
from mooncake_store.protocol.express import EXPRESS_METHOD
from mooncake_store.quick import Handed, Stage
from mooncake_transfer import Peer

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def quiet():
    """Nobody but the test asks the master."""
    return StoreConfig(heartbeat_s=60.0, lease_ttl_s=600.0, client_ttl_s=600.0, put_wait_s=0.1)


def pair(world, config):
    """An owner with the master, and a guest that has reached the owner's segment already."""
    engine = world.engine()
    owner = world.store(engine, lend=MIB, config=config)
    guest = world.store(world.engine(), engine.address, config=config)
    guest.put("warm", b"up")
    guest.remove("warm")
    return owner, guest


def array_of(region):
    return np.frombuffer(region.view(), dtype=np.uint8)


class NeedsPython(Exception):
    pass


@pytest.fixture
def quickly(monkeypatch, eventually):
    """Makes a call without Python on its way, as often as it takes.

    A master that is kept from its processor sends it the other way, now and then.
    """

    def refusing(original):
        def refuse(*args, **options):
            # The client's own thread tells the master of leases that have ended.
            if threading.current_thread() is threading.main_thread():
                raise NeedsPython
            return original(*args, **options)

        return refuse

    def make(call):
        answers = []

        def attempt():
            try:
                answers.append(call())
            except NeedsPython:
                return False
            return True

        with monkeypatch.context() as patch:
            for owner, name in ((Peer, "call"), (Mover, "read"), (Mover, "write")):
                patch.setattr(owner, name, refusing(getattr(owner, name)))
            eventually(attempt)
        return answers[0]

    return make


def test_usual_calls_need_no_python(world, quiet, quickly):
    _, guest = pair(world, quiet)
    region = guest.engine.allocate(64 * KIB)
    here = array_of(region)
    here[:5000] = np.arange(5000) % 251
    quickly(lambda: guest.put_from("a", region, 1000, 3000, if_exists="replace"))
    quickly(lambda: guest.put(b"b", b"bytes", if_exists="replace"))
    quickly(lambda: guest.put("b", memoryview(b"others"), if_exists="replace"))
    assert quickly(lambda: guest.get_into("a", region, 10_000, 3000)) == 3000
    assert quickly(lambda: guest.get("b")) == b"others"
    with pytest.raises(errors.KeyNotFound, match="'c'"):
        quickly(lambda: guest.get_into("c", region, 0, 10))
    with pytest.raises(errors.KeyNotFound, match="'c'"):
        quickly(lambda: guest.get("c"))
    assert np.array_equal(here[10_000:13_000], here[1000:4000])
    numbers = guest.numbers()
    assert numbers.calls["get"].count == 4
    assert (numbers.hits, numbers.read_bytes) == (2, 3006)
    assert numbers.misses == 2
    assert numbers.calls["master.Locate"].count >= 4
    assert sum(numbers.calls["master.Commit"].buckets) == numbers.calls["master.Commit"].count


def test_what_is_unusual_comes_to_the_same(world, quiet):
    _, guest = pair(world, quiet)
    region = guest.engine.allocate(64 * KIB)
    guest.put("a", b"x" * 100)
    with pytest.raises(errors.SizeMismatch, match="has 100 bytes, room is for 99"):
        guest.get_into("a", region, 0, 99)
    with pytest.raises(errors.KeyExists):
        guest.put_from("a", region, 0, 5)
    guest.put_from("a", region, 0, 5, if_exists="keep")
    assert guest.get("a") == b"x" * 100
    with pytest.raises(errors.ConfigError):
        guest.put_from("a", region, 0, 5, if_exists="never")
    for offset, nbytes in ((64 * KIB, 1), (0, 64 * KIB + 1), (-1, 1), (1, -1), (2**64, 1), (0, 2**70)):
        with pytest.raises(errors.ValueInvalid):
            guest.put_from("b", region, offset, nbytes)
        with pytest.raises(errors.ValueInvalid):
            guest.get_into("a", region, offset, nbytes)
    for key in ("", b"", b"k" * (64 * KIB + 1), 7, None):
        with pytest.raises(errors.KeyInvalid):
            guest.put_from(key, region, 0, 5)
        with pytest.raises(errors.KeyInvalid):
            guest.get(key)
    guest.put("empty", b"")
    assert guest.get("empty") == b""
    assert guest.get_into("empty", region, 0, 0) == 0
    with pytest.raises(errors.StoreFull):
        guest.put("large", bytes(2 * MIB))
    guest.put_from("numpy", region, np.int64(0), np.uint64(5))
    assert guest.get_into("numpy", region, np.int64(8), np.uint64(5)) == 5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_calls_of_two_clients_agree_with_a_model(world, content, seed):
    engine = world.engine()
    config = StoreConfig(put_wait_s=0.1)
    owner = world.store(engine, lend=8 * MIB, config=config)
    guests = [world.store(world.engine(), engine.address, config=config) for _ in range(2)]
    regions = [guest.engine.allocate(64 * KIB) for guest in guests]
    dice, model = random.Random(seed), {}
    for version in range(250):
        who = dice.randrange(2)
        guest, region, key = guests[who], regions[who], f"k{dice.randrange(8)}"
        step = dice.choice(("put", "put_from", "replace", "get", "get_into", "remove", "owner"))
        value = content(key.encode(), version, dice.choice((1, 100, 4096, 20_000)))
        if step in ("put", "put_from", "replace"):
            if_exists = "replace" if step == "replace" else "keep"
            if step == "put_from":
                array_of(region)[: len(value)] = np.frombuffer(value, dtype=np.uint8)
                guest.put_from(key, region, 0, len(value), if_exists=if_exists)
            else:
                guest.put(key, value, if_exists=if_exists)
            if step == "replace" or key not in model:
                model[key] = value
        elif step == "remove":
            assert guest.batch_remove([key]) == [model.pop(key, None) is not None]
        elif key not in model:
            with pytest.raises(errors.KeyNotFound):
                guest.get(key)
        elif step == "get_into":
            nbytes = guest.get_into(key, region, 100, 30_000)
            assert array_of(region)[100 : 100 + nbytes].tobytes() == model[key]
        else:
            assert (owner if step == "owner" else guest).get(key) == model[key]


def test_leases_of_quick_reads_end_without_another_call(world, fast, eventually):
    owner, guest = pair(world, fast)
    region = guest.engine.allocate(64 * KIB)
    guest.put_from("a", region, 0, 10_000)
    for _ in range(50):
        guest.get_into("a", region, 0, 10_000)
    eventually(lambda: owner.stats().leased_bytes == 0)
    guest.get_into("a", region, 0, 10_000)
    eventually(lambda: owner.stats().leased_bytes == 0)


def test_a_read_whose_lease_may_have_ended_is_confirmed_by_the_master(world, quiet, monkeypatch):
    _, guest = pair(world, quiet)
    region = guest.engine.allocate(64 * KIB)
    guest.put("a", b"x" * 1000)
    guest.get_into("a", region, 0, 1000)
    member = guest._member
    link = member._link
    member.quick.join(link.express_connection, member._epoch, member.client, 0.0, 60.0, 0.0)
    monkeypatch.setattr(membership, "SURE_LEASE", 0.0)
    assert guest.get_into("a", region, 5000, 1000) == 1000
    assert guest.get("a") == b"x" * 1000
    assert array_of(region)[5000:6000].tobytes() == b"x" * 1000
    assert guest.numbers().calls["master.Release"].count == 2


def test_a_segment_that_was_forgotten_is_reached_anew(world, quiet):
    owner, guest = pair(world, quiet)
    guest.put("a", b"x" * 1000)
    for segment in list(guest._mover._remotes):
        guest._mover.forget(segment)
    assert guest.get("a") == b"x" * 1000
    assert guest.get("a") == b"x" * 1000
    assert owner.get("a") == b"x" * 1000


class Fake:
    """An engine that answers the express way as it is told, and a client of it."""

    def __init__(self, world):
        self.there, self.here = world.engine(), world.engine()
        self.answers, self.asked, self.woken = [], [], []
        self.there.serve(EXPRESS_METHOD, self.answer)
        self.target, self.local = self.there.allocate(64 * KIB), self.here.allocate(64 * KIB)
        self.descriptor = self.target.descriptor()
        peer = self.here.connect(self.there.address)
        self.quick = Quick(
            self.here.compiled_calls(),
            EXPRESS_METHOD,
            bytes(16),
            lambda: self.woken.append(1),
            10.0,
            10.0,
            True,
        )
        self.quick.join(peer.connection, 5, 77, 60.0, 60.0, 0.0)
        self.remote = self.here.import_region(self.descriptor)
        self.quick.know(3, self.descriptor, self.remote, False)

    def answer(self, payload, caller):
        self.asked.append(bytes(payload))
        return self.answers.pop(0)

    def head(self, kind, count, lists=0, segments=0, id=0, flags=0):
        return struct.pack("<BBHIIIQ", kind, flags, segments, count, lists, 0, id)

    def places(self, *rows, segment=3, descriptor=None):
        descriptor = self.descriptor if descriptor is None else descriptor
        packed = struct.pack("<I", len(rows)) + b"".join(struct.pack("<5Q", *row) for row in rows)
        return packed + struct.pack("<QI", segment, len(descriptor)) + descriptor

    def located(self, nbytes, *rows, **where):
        return self.head(1, 1, 1, 1, id=9) + b"\1" + struct.pack("<Q", nbytes) + self.places(*rows, **where)

    def reserved(self, *rows, outcome=0, **where):
        return self.head(4, 1, 1, 1, id=8) + bytes([outcome]) + self.places(*rows, **where)


@pytest.fixture
def fake(world):
    return Fake(world)


def test_only_one_whole_piece_at_a_place_that_is_known_is_moved(fake):
    here, there = array_of(fake.local), array_of(fake.target)
    there[:] = 7
    fake.answers = [fake.located(100, (0, 0, 3, 500, 100))]
    assert fake.quick.get_into("k", fake.local, 50, 100) == 100
    assert here[50:150].tolist() == [7] * 100
    assert not here[:50].any()
    assert not here[150:].any()
    here[:] = 0
    unusual = [
        fake.located(100, (0, 0, 3, 500, 60), (0, 60, 3, 700, 40)),
        fake.located(100, (0, 0, 4, 500, 100), segment=4),
        fake.located(100, (0, 0, 3, 500, 100), descriptor=fake.descriptor + b"x"),
        fake.located(101, (0, 0, 3, 500, 101)),
        fake.located(100, (0, 10, 3, 500, 100)),
        fake.located(100, (0, 0, 3, 500, 100))[:-5],
    ]
    for answer in unusual:
        fake.answers = [answer]
        handed = Handed(*fake.quick.get_into("k", fake.local, 50, 100))
        assert handed.stage == Stage.ANSWERED
        assert (handed.answer, handed.epoch, handed.failure) == (answer, 5, None)
    assert not here.any(), "nothing has moved"


def test_what_comes_over_a_network_is_compared_with_its_checksum(fake):
    there, number = array_of(fake.target), (100).to_bytes(8, "little")
    there[:] = np.arange(len(there)) % 251
    (sum_,) = struct.unpack("<Q", value_sums(there.ctypes.data, 600, (500).to_bytes(8, "little"), number))
    fake.quick.know(3, fake.descriptor, fake.remote, True)

    def answer(sum_):
        head = fake.head(1, 1, 1, 1, id=9, flags=8)
        return head + b"\1" + struct.pack("<QQ", 100, sum_) + fake.places((0, 0, 3, 500, 100))

    fake.answers = [answer(sum_)]
    assert fake.quick.get_into("k", fake.local, 50, 100) == 100
    assert struct.unpack_from("<B", fake.asked[0], 1) == (2,), "it asks for checksums"
    # One that differs, one that is not known, and a master that does not tell any.
    for given in (answer(sum_ ^ 1), answer(0), fake.located(100, (0, 0, 3, 500, 100))):
        fake.answers = [given]
        assert Handed(*fake.quick.get_into("k", fake.local, 50, 100)).stage == Stage.ANSWERED


def test_a_put_tells_the_checksum_of_its_value(fake):
    array_of(fake.local)[:] = 9
    fake.answers = [fake.reserved((0, 0, 3, 1000, 200)), fake.head(5, 1) + b"\3"]
    assert fake.quick.put_from("k", fake.local, 0, 200, True, 5, 41) is True
    expected = value_sums(fake.local.address, 200, bytes(8), (200).to_bytes(8, "little"))
    assert fake.asked[1][48:] == expected


def test_the_next_question_tells_of_leases_that_have_ended(fake):
    fake.quick.idle()
    fake.answers = [fake.located(8, (0, 0, 3, 0, 8)), fake.head(1, 1) + b"\0" + bytes(8)]
    assert fake.quick.get_into("k", fake.local, 0, 8) == 8
    assert fake.woken == [1]
    assert fake.quick.ended_for_s() > 0
    assert Handed(*fake.quick.get_into("k", fake.local, 0, 8)).stage == Stage.MISSING
    assert struct.unpack_from("<Q", fake.asked[1], 48) == (9,)
    assert fake.quick.ended_for_s() == 0
    assert fake.quick.take_ended() == []


def test_a_master_that_sends_it_the_other_way_is_left_alone_for_a_moment(fake, eventually):
    fake.answers = [fake.located(8, (0, 0, 3, 0, 8)), b"", fake.located(8, (0, 0, 3, 0, 8))]
    fake.quick.get_into("k", fake.local, 0, 8)
    assert Handed(*fake.quick.get_into("k", fake.local, 0, 8)).stage == Stage.OTHER_WAY
    assert fake.quick.take_ended() == [9], "the lease that the question told of is still to be told of"
    eventually(lambda: fake.quick.get_into("k", fake.local, 0, 8) == 8)


def test_a_put_is_gone_on_with_where_it_was_left(fake):
    array_of(fake.local)[:] = 9
    placed = (0, 0, 3, 1000, 200)
    committed = fake.head(5, 1) + b"\3"
    fake.answers = [fake.reserved(placed), committed]
    assert fake.quick.put_from("k", fake.local, 0, 200, True, 5, 41) is True
    assert array_of(fake.target)[1000:1200].tolist() == [9] * 200
    kind, flags, id, seen = struct.unpack_from("<BB30xQQ", fake.asked[1])
    assert (kind, flags, id, seen) == (5, 1, 8, 41)

    fake.answers = [fake.reserved(outcome=1)]
    assert Handed(*fake.quick.put_from("k", fake.local, 0, 200, False, 5, 41)).stage == Stage.ANSWERED
    fake.answers = [fake.reserved(placed), b""]
    handed = Handed(*fake.quick.put_from("k", fake.local, 0, 200, False, 4, 41))
    assert (handed.stage, handed.committed) == (Stage.MOVED, b"")
    assert struct.unpack_from("<Q", fake.asked[-1], 40) == (0,), "records of another epoch are not confirmed"


def test_an_outcome_or_records_of_a_commit_are_handed_over(fake):
    placed = (0, 0, 3, 1000, 200)
    page = fake.head(5, 1, lists=1) + b"\3" + struct.pack("<QI", 1, 0)
    for answer in (fake.head(5, 1) + b"\1", fake.head(5, 0), page):
        fake.answers = [fake.reserved(placed), answer]
        handed = Handed(*fake.quick.put_from("k", fake.local, 0, 200, False, 5, 0))
        assert (handed.stage, handed.committed) == (Stage.DONE, answer)


def test_moves_from_segments_that_are_gone_are_forgotten(fake):
    fake.quick.keep_only([1, 2], 0.0)
    answer = fake.located(8, (0, 0, 3, 0, 8))
    fake.answers = [answer]
    assert Handed(*fake.quick.get_into("k", fake.local, 0, 8)).stage == Stage.ANSWERED


def test_who_has_left_asks_nobody(fake):
    fake.quick.leave()
    assert not fake.quick.joined
    assert fake.quick.get_into("k", fake.local, 0, 8) is None
    assert fake.quick.get("k", fake.local) is None
    assert fake.quick.put_from("k", fake.local, 0, 8, False, 5, 0) is None
    assert fake.asked == []


def test_a_question_that_is_not_answered_is_told_with_its_reason(fake):
    fake.there.close()
    handed = Handed(*fake.quick.get("k", fake.local))
    assert handed.stage == Stage.NOT_ASKED
    assert "connection" in str(handed.failure)
