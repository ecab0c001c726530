"""The express way: usual requests are answered by compiled code, with the same outcome as the other way."""

import random
import threading
from contextlib import contextmanager

import msgspec
import pytest

from mooncake_store import Master, StoreConfig, errors
from mooncake_store._core import express_answer, express_ask
from mooncake_store.master import server
from mooncake_store.policy import PutPolicy, TenantPolicy
from mooncake_store.protocol import METHOD
from mooncake_store.protocol.express import EXPRESS_METHOD
from mooncake_transfer import Peer

KIB, MIB = 1 << 10, 1 << 20


@contextmanager
def ways(monkeypatch):
    """Counts the calls of this process to masters by the method's name."""
    taken = []
    call = Peer.call

    def counting(self, method, payload=b"", *, timeout_s=None):
        taken.append(method)
        return call(self, method, payload, timeout_s=timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(Peer, "call", counting)
        yield taken


@pytest.fixture
def quiet():
    """Heartbeats go the other way, so there are none while calls are counted."""
    return StoreConfig(heartbeat_s=60.0, lease_ttl_s=600.0, client_ttl_s=600.0, put_wait_s=0.1)


def pair(world, config):
    engine = world.engine()
    owner = world.store(engine, lend=MIB, config=config)
    return owner, world.store(world.engine(), engine.address, config=config)


def test_usual_puts_gets_and_questions_need_no_interpreter_at_the_master(world, quiet, monkeypatch):
    _, guest = pair(world, quiet)
    with ways(monkeypatch) as taken:
        guest.put("a", b"1" * 5000)
        guest.put("a", b"2", if_exists="replace", policy=PutPolicy())
        assert guest.get("a") == b"2"
        assert guest.batch_exist(["a", "b"]) == [True, False]
        with pytest.raises(errors.KeyNotFound):
            guest.get("b")
        with pytest.raises(errors.KeyExists):
            guest.put("a", b"3")
    assert EXPRESS_METHOD in taken
    assert METHOD not in taken


def test_unusual_puts_go_the_other_way_and_so_does_all_with_limits_of_a_rate(world, quiet, monkeypatch):
    _, guest = pair(world, quiet)
    with ways(monkeypatch) as taken:
        guest.put("a", b"1", policy=PutPolicy(priority=3))
    assert taken.count(METHOD) == 1
    limited = {"slow": TenantPolicy(keys_per_s=1e6)}
    engine = world.engine()
    world.stack.enter_context(Master(engine, StoreConfig(tenants=limited)))
    other = world.store(world.engine(), engine.address, config=StoreConfig(tenant="slow"))
    with ways(monkeypatch) as taken:
        assert not other.exist("a")
    assert taken == [EXPRESS_METHOD, METHOD]


def test_a_batch_that_would_hold_up_others_goes_the_other_way(world, quiet, monkeypatch):
    _, guest = pair(world, quiet)
    guest.put("a", b"1")
    with ways(monkeypatch) as taken:
        assert guest.batch_exist(["a", *(f"k{number}" for number in range(70_000))]).count(True) == 1
    assert taken == [EXPRESS_METHOD, METHOD]


def test_both_ways_come_to_the_same(world, fast):
    seed = random.randrange(2**32)
    seen = []
    for express in (True, False):
        owner, guest = pair(world, fast)
        link = guest._member._link
        if not express:
            link._express_from_s, guest._quick = float("inf"), None
        seen.append((steps(random.Random(seed), guest), numbers(owner)))
    assert seen[0] == seen[1], f"seed {seed}"


def steps(chance, store):
    """What came of random calls on few keys, in a store with room for few values."""
    found = []
    for number in range(150):
        key = f"key-{chance.randrange(12)}"
        value = bytes([number]) * chance.choice([0, 1, 4096, 100 * KIB, 400 * KIB])
        try:
            match chance.randrange(5):
                case 0 | 1:
                    store.put(key, value, if_exists=chance.choice(["error", "keep", "replace"]))
                    found.append(None)
                case 2 | 3:
                    found.append(store.get(key)[:1])
                case _:
                    found.append(store.exist(key))
        except errors.StoreError as error:
            found.append(type(error).__name__)
    return found


def numbers(owner):
    stats = owner.stats()
    return stats.objects, stats.stored, stats.removed, stats.hits, stats.misses


def test_what_the_desk_answered_is_in_the_report(world, fast):
    owner, guest = pair(world, fast)
    guest.put("a", bytes(4096))
    for _ in range(20):
        guest.get("a")
    report = owner.report(hot=1)
    assert report.requests["Locate"].count == 20
    assert sum(report.requests["Locate"].buckets) == 20
    assert report.requests["Commit"].count == 1
    assert report.hot[0].reads == 20
    assert (report.tenants[0].hits, report.tenants[0].misses) == (20, 0)


def test_an_owner_is_told_at_once_of_what_left_for_an_express_put(world, quiet, eventually):
    owner, guest = pair(world, quiet)
    gone = []
    owner.on_evicted(gone.extend)
    for number in range(4):
        guest.put(f"k{number}", bytes(400 * KIB))
    eventually(lambda: gone == [b"k0", b"k1"])


def test_bytes_that_are_no_request_are_sent_the_other_way(world, fast):
    owner, guest = pair(world, fast)
    guest.put("a", b"1")
    member = guest._member
    peer = guest.engine.connect(owner.engine.address)
    chance = random.Random(7)
    sound = express_ask(1, member._epoch, member.client, bytes(32))
    for _ in range(300):
        broken = bytearray(sound[: chance.randrange(len(sound) + 1)])
        for _ in range(chance.randrange(4)):
            if broken:
                broken[chance.randrange(len(broken))] = chance.randrange(256)
        peer.call(EXPRESS_METHOD, bytes(broken))
    assert guest.get("a") == b"1"
    assert owner.stats().objects == 1


def test_nobody_is_answered_for_another_connection_s_member(world, fast):
    owner, guest = pair(world, fast)
    asked = express_ask(3, guest._member._epoch, guest._member.client, bytes(16))
    stranger = world.engine().connect(owner.engine.address)
    assert express_answer(stranger.call(EXPRESS_METHOD, asked)) is None


def test_a_master_that_has_closed_answers_nobody_the_express_way(world, fast):
    engine = world.engine()
    with Master(engine, fast):
        guest = world.store(world.engine(), engine.address, lend=MIB)
        guest.put("a", b"1")
    with pytest.raises(errors.MasterUnreachable):
        guest.get("a")


def test_a_bell_is_rung_though_the_master_was_busy_ringing_another(world, quiet, monkeypatch, eventually):
    monkeypatch.setattr(server, "TICK_S", 60.0)
    config = msgspec.structs.replace(quiet, reservation_ttl_s=600.0)
    engine = world.engine()
    master = world.stack.enter_context(Master(engine, config))
    owner = world.store(world.engine(), engine.address, lend=MIB, config=config)
    guest = world.store(world.engine(), engine.address, config=config)
    rung, busy = [], threading.Event()

    def ring(member):
        rung.append(member.client)
        assert busy.wait(30.0)

    monkeypatch.setattr(master, "_ring", ring)
    for number in range(3):  # the last makes the first leave, and its owner has to know
        guest.put(f"k{number}", bytes(400 * KIB))
    eventually(lambda: rung)
    owner._member.catch_up()
    with ways(monkeypatch) as taken:
        guest.put("k3", bytes(400 * KIB))
    assert METHOD not in taken
    busy.set()
    eventually(lambda: rung.count(owner._member.client) == 2)
