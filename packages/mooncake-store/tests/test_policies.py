"""What puts say about their values, and what tenants may do."""

import msgspec
import numpy as np
import pytest

from mooncake_store import PutPolicy, StoreConfig, TenantPolicy, errors, protocol
from mooncake_store.keys import object_digests
from mooncake_store.listing import KeysWanted
from mooncake_store.master.state import MasterState

KIB, MIB = 1 << 10, 1 << 20


def limited(fast, **tenants):
    return msgspec.structs.replace(fast, tenants=tenants)


def holding(store):
    """Ids of the segments in which something lies."""
    return {segment.segment for segment in store.report().segments if segment.evictable_bytes}


def fill(store, count=12, **options):
    for number in range(count):
        store.put(f"fill-{number}", bytes(100 * KIB), if_exists="replace", **options)


@pytest.fixture
def store(world):
    return world.store(world.engine(), lend=MIB)


def test_what_is_pinned_hard_stays_whatever_comes(store):
    store.put("pinned", bytes(100 * KIB), policy=PutPolicy(hard_pin=True))
    store.put("later", bytes(100 * KIB))
    store.pin("later")
    fill(store)
    assert store.batch_exist(["pinned", "later"]) == [True, True]
    store.unpin("later")
    fill(store)
    assert store.batch_exist(["pinned", "later"]) == [True, False]
    assert store.batch_pin(["pinned", "unknown"], soft_s=5.0) == [True, False]
    for call in (store.pin, store.unpin, store.size):
        with pytest.raises(errors.KeyNotFound, match="unknown"):
            call("unknown")


def test_what_is_pinned_softly_goes_last(store):
    store.put("soft", bytes(100 * KIB), policy=PutPolicy(soft_pin_s=60.0))
    store.put("urgent", bytes(100 * KIB), policy=PutPolicy(priority=15))
    fill(store, 11)
    assert store.batch_exist(["soft", "urgent"]) == [True, True]
    store.put("all", bytes(MIB))
    assert store.batch_exist(["soft", "urgent", "all"]) == [False, False, True]


def test_sessions_end_and_groups_leave_together(store):
    store.put("s", bytes(100 * KIB), policy=PutPolicy(session="chat", priority=9))
    for key in ("g1", "g2"):
        store.put(key, bytes(100 * KIB), policy=PutPolicy(group="prompt"))
    fill(store, 7, policy=PutPolicy(priority=1))
    assert store.batch_exist(["s", "g1", "g2"]) == [True, True, True]
    assert store.end_session("chat") == 1
    fill(store, 8, policy=PutPolicy(priority=1))
    assert store.batch_exist(["s", "g1", "g2"]) == [False, True, True]
    fill(store, 9, policy=PutPolicy(priority=1))
    assert store.batch_exist(["g1", "g2"]) == [False, False]
    assert store.end_session("chat") == 0


def pieces(store, key):
    """Segment and bytes of each extent of a value, in their order."""
    reading = store._read([key])
    with reading:
        rows = np.frombuffer(reading._located.placement.rows, dtype="<u8").reshape(-1, 5)
    return rows[:, [2, 4]].tolist()


def test_a_large_value_is_striped_over_as_many_owners_as_are_wished(world, content):
    engine = world.engine()
    client = world.store(engine)
    owners = [world.store(world.engine(), engine.address, lend=16 * MIB) for _ in range(3)]
    value = content(b"k", 1, 8 * MIB + 5)
    client.put("whole", value)
    assert [size for _, size in pieces(client, "whole")] == [len(value)]
    client.put("two", value, policy=PutPolicy(stripes=2, preferred_segments=(owners[2].segment_id,)))
    (first, larger), (second, smaller) = pieces(client, "two")
    assert (first, larger + smaller) == (owners[2].segment_id, len(value))
    assert second != first
    assert 0 < larger - smaller <= 2 * 4096
    client.remove("whole")
    client.put("three", value, policy=PutPolicy(stripes=4))
    assert {segment for segment, _ in pieces(client, "three")} == {owner.segment_id for owner in owners}
    assert [client.get(key) == value for key in ("two", "three")] == [True, True]
    assert owners[0].get("three") == value
    client.put("small", bytes(2 * MIB - 1), policy=PutPolicy(stripes=4))
    assert len(pieces(client, "small")) == 1


def test_a_striped_value_takes_the_owners_that_have_room(world, content, eventually):
    engine = world.engine()
    client = world.store(engine)
    owners = [world.store(world.engine(), engine.address, lend=nbytes * MIB) for nbytes in (1, 6, 6)]
    value = content(b"k", 1, 6 * MIB)
    client.put("three", value, policy=PutPolicy(stripes=3))
    assert {segment for segment, _ in pieces(client, "three")} == {owner.segment_id for owner in owners[1:]}
    assert client.get("three") == value
    assert client.stats().used_bytes == len(value)
    client.remove_all()
    eventually(lambda: client.stats().used_bytes == 0)  # leases end a bit later
    with pytest.raises(errors.ConfigError, match="stripes is 5"):
        PutPolicy(stripes=5)
    other = content(b"k", 2, 12 * MIB)
    client.put("all", other, policy=PutPolicy(stripes=2))
    assert client.get("all") == other


def test_a_value_survives_one_owner_of_its_replicas_even_while_it_is_read(world, content, eventually):
    engine = world.engine()
    master = world.store(engine)
    owners = [world.store(world.engine(), engine.address, lend=MIB) for _ in range(3)]
    value = content(b"k", 1, 300 * KIB)
    master.put("k", value, policy=PutPolicy(replicas=2))
    assert master.stats().used_bytes == 600 * KIB
    holders = [owner for owner in owners if owner.segment_id in holding(master)]
    assert len(holders) == 2
    holders[0].close()
    assert master.get("k") == value
    eventually(lambda: master.stats().used_bytes == 300 * KIB)
    holders[1].close()
    with pytest.raises(errors.KeyNotFound):
        master.get("k")


def test_a_read_that_fails_at_one_replica_goes_on_at_another(world, content, eventually):
    engine = world.engine()
    slow = msgspec.structs.replace(StoreConfig(), heartbeat_s=0.1)
    reader = world.store(engine, config=slow)
    child = world.child(master=engine.address, lend=MIB)
    other = world.store(world.engine(), engine.address, lend=MIB)
    value = content(b"k", 1, 300 * KIB)
    policy = PutPolicy(replicas=2, preferred_segments=(other.segment_id,))
    reader.put("k", value, policy=policy)
    assert reader.stats().used_bytes == 600 * KIB
    child.kill()
    for _ in range(5):
        assert reader.get("k") == value
        assert reader.get_range("k", 100, 50) == value[100:150]


def test_values_go_where_they_are_wished_to_go(world):
    engine = world.engine()
    writer = world.store(engine, lend=MIB)
    others = [world.store(world.engine(), engine.address, lend=MIB) for _ in range(2)]
    assert writer.segment_id != 0
    for number, other in enumerate(others):
        writer.put(f"k{number}", b"1", policy=PutPolicy(preferred_segments=(other.segment_id,)))
        assert holding(writer) == {other.segment_id for other in others[: number + 1]}
    writer.put("near", b"1")
    assert writer.segment_id in holding(writer)


def test_a_tenant_cannot_store_more_than_its_quota(world, fast):
    engine = world.engine()
    config = limited(
        fast,
        strict=TenantPolicy(quota_bytes=300 * KIB),
        own=TenantPolicy(quota_bytes=300 * KIB, eviction="own"),
    )
    world.store(engine, lend=MIB, config=config)
    strict, own = (
        world.store(world.engine(), engine.address, config=msgspec.structs.replace(fast, tenant=tenant))
        for tenant in ("strict", "own")
    )
    for store in (strict, own):
        for number in range(3):
            store.put(f"k{number}", bytes(100 * KIB))
    with pytest.raises(errors.QuotaExceeded, match="tenant 'strict'"):
        strict.put("more", b"1")
    region = world.region(strict.engine, bytes(KIB))
    assert strict.batch_put_from(["more"], region, [0], KIB) == [False]
    own.put("more", b"1")
    assert own.batch_exist(["k0", "k1", "k2", "more"]).count(True) == 3
    assert strict.batch_exist(["k0", "k1", "k2"]) == [True] * 3
    strict.remove("k0")
    strict.put("more", b"1")


def test_who_asks_too_often_is_told_when_to_come_back(fast):
    rate = TenantPolicy(keys_per_s=10.0)
    state = MasterState(1, msgspec.structs.replace(fast, tenants={"t": rate}, client_ttl_s=1e9))
    for client, tenant in ((1, "t"), (2, "")):
        mount = protocol.Mount(client=client, nbytes=0, descriptor=b"", tenant=tenant)
        state.handle(mount, client, "", 0.0)

    def exist(client, count, now_s):
        digests = object_digests("t", [b"%d" % number for number in range(count)])
        return state.handle(protocol.Exist(epoch=1, client=client, digests=digests), client, "", now_s)

    assert isinstance(exist(1, 10, 5.0), protocol.Found)
    refused = exist(1, 1, 5.0)
    assert isinstance(refused, protocol.Limited)
    assert isinstance(exist(2, 100, 5.0), protocol.Found)
    assert isinstance(exist(1, 30, 5.0 + refused.retry_after_s), protocol.Found)
    assert isinstance(exist(1, 1, 7.0), protocol.Limited)
    assert isinstance(exist(1, 1, 9.0), protocol.Found)


def test_a_client_that_asks_too_often_gets_a_typed_error(world, fast):
    engine = world.engine()
    world.store(engine, config=limited(fast, t=TenantPolicy(keys_per_s=0.5)))
    store = world.store(world.engine(), engine.address, config=msgspec.structs.replace(fast, tenant="t"))
    store.batch_exist(["a"] * 100)
    with pytest.raises(errors.RateLimited, match="tenant 't' asks for more keys") as caught:
        store.exist("a")
    assert 0 < caught.value.retry_after_s < 300


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"priority": 16}, "priority is 16"),
        ({"soft_pin_s": 0.0}, "soft_pin_s is 0.0"),
        ({"group": "g" * 1025}, "name of the group"),
    ],
)
def test_policies_that_cannot_work_are_refused(options, complaint):
    with pytest.raises(errors.ConfigError, match=complaint):
        PutPolicy(**options)
    with pytest.raises(errors.ConfigError, match="quota_bytes is 0"):
        TenantPolicy(quota_bytes=0)


def test_keys_are_listed_and_removed_by_what_they_look_like(world, fast):
    engine = world.engine()
    first = world.store(engine, lend=MIB)
    second = world.store(world.engine(), engine.address, lend=MIB)
    other = world.store(world.engine(), engine.address, config=msgspec.structs.replace(fast, tenant="other"))
    region = world.region(engine, bytes(300))
    names = [f"model/{number}" for number in range(100)]
    first.batch_put_from(names, region, np.zeros(100, np.int64), 3)
    second.put("note", b"12345", policy=PutPolicy(preferred_segments=(second.segment_id,)))
    other.put("model/7", b"another tenant's")
    for store in (first, second):
        assert sorted(store.ls()) == sorted([(name.encode(), 3) for name in names] + [(b"note", 5)])
        assert store.ls(prefix="no") == [(b"note", 5)]
        assert sorted(key for key, _ in store.ls("/9.?$", prefix="model/")) == sorted(
            name.encode() for name in names if name.startswith("model/9")
        )
    assert (first.size("note"), second.batch_size(["model/1", "unknown"])) == (5, [3, None])
    assert second.remove_by_regex("^model/.[02468]$") == 45
    assert len(first.ls()) == 56
    assert first.remove_all() == 56
    assert first.ls() == []
    assert other.ls() == [(b"model/7", 16)]
    with pytest.raises(errors.ConfigError, match="no regular expression"):
        first.ls("(")


def test_an_owner_shows_keys_only_to_those_its_master_names(world):
    engine = world.engine()
    owner = world.store(engine, lend=MIB)
    owner.put("secret", b"1")
    stranger = world.engine()
    method = f"{protocol.METHOD}.keys.{owner._member.client:016x}"
    wanted = msgspec.msgpack.encode(KeysWanted("", b"guessed", b"", 0))
    with pytest.raises(Exception, match="shown to those its master names"):
        stranger.connect(engine.address).call(method, wanted, timeout_s=5.0)
