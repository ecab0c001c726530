"""Replicas beside those that puts make: on request, after a death, and because a segment is to be empty."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake_store import Master, PutPolicy, Store, StoreConfig, errors
from mooncake_store.policy import TenantPolicy
from mooncake_store.protocol import CopyOutcome
from mooncake_transfer.errors import MemoryUnavailable, TransferCancelled, TransferTimeout

MIB = 1 << 20
KEYS = [f"key-{number}" for number in range(12)]


class Cluster:
    """A master, two or more owners and a client, with engines of their own."""

    def __init__(self, world: Any, config: StoreConfig, lent: list[int]) -> None:
        self.world, self.config = world, config
        engine = world.engine("tcp")
        self.master = world.stack.enter_context(Master(engine, config))
        self.owners: list[Store] = [self.owner(nbytes) for nbytes in lent]
        self.client: Store = world.store(world.engine("tcp"), engine.address, config=config)

    def owner(self, nbytes: int) -> Store:
        owner: Store = self.world.store(
            self.world.engine("tcp"), self.master.address, lend=nbytes, config=self.config
        )
        return owner

    def ids(self, *numbers: int) -> set[int]:
        return {self.owners[number].segment_id for number in numbers}

    def on(self, owner: int, **policy: Any) -> PutPolicy:
        return PutPolicy(preferred_segments=(self.owners[owner].segment_id,), **policy)

    def fill(self, content: Any, owner: int, nbytes: int = MIB, **policy: Any) -> None:
        for key in KEYS:
            self.client.put(key, content(key.encode(), 1, nbytes), policy=self.on(owner, **policy))

    def all_right(self, content: Any, nbytes: int = MIB) -> bool:
        return all(self.client.get(key) == content(key.encode(), 1, nbytes) for key in KEYS)


def has_master(store: Store) -> bool:
    try:
        store.stats()
    except errors.MasterUnreachable:
        return False
    return True


@pytest.fixture(params=[False, True], ids=["forgetting", "recovering"])
def cluster(request: pytest.FixtureRequest, world: Any, fast: StoreConfig) -> Callable[..., Cluster]:
    tenants = {"small": TenantPolicy(quota_bytes=8 * MIB, eviction="own")}
    config = msgspec.structs.replace(fast, recovery=request.param, heartbeat_s=0.05, tenants=tenants)
    return lambda *lent: Cluster(world, config, list(lent))


def test_a_value_is_copied_to_a_segment_and_found_there_when_the_first_owner_has_gone(
    cluster: Callable[..., Cluster], content: Any
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    value = content(b"k", 1, 3 * MIB)
    few.client.put("k", value, policy=few.on(0))
    few.client.copy("k", few.owners[1].segment_id)
    assert set(few.client.replicas("k")) == few.ids(0, 1)
    few.client.copy("k", few.owners[1].segment_id)  # there already
    few.owners[0].close()
    assert few.client.get("k") == value
    assert few.client.replicas("k") == [few.owners[1].segment_id]


def test_a_moved_value_leaves_its_first_segment(
    cluster: Callable[..., Cluster], content: Any, eventually: Any
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    value = content(b"k", 1, 3 * MIB)
    few.client.put("k", value, policy=few.on(0))
    gone: list[list[bytes]] = []
    few.client.on_evicted(gone.append)
    few.owners[0].on_evicted(gone.append)
    source, target = few.owners[0].segment_id, few.owners[1].segment_id
    few.client.move("k", source, target)
    assert few.client.replicas("k") == [target]
    eventually(lambda: few.master.report().segments[0].free_bytes == 16 * MIB)
    assert few.client.get("k") == value
    assert not gone, "it is still in the store"
    assert few.owners[1].ls() == [(b"k", 3 * MIB)]


def test_a_copy_beyond_the_quota_evicts_nothing_of_the_tenant_also_where_puts_would(
    cluster: Callable[..., Cluster], content: Any
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    config = msgspec.structs.replace(few.config, tenant="small")
    client = few.world.store(few.world.engine("tcp"), few.master.address, config=config)
    for key in ("a", "b"):
        client.put(key, content(key.encode(), 1, 3 * MIB), policy=few.on(0))
    with pytest.raises(errors.CopyFailed, match="quota"):
        client.copy("a", few.owners[1].segment_id)
    assert client.batch_exist(["a", "b"]) == [True, True]


def test_what_is_read_stays_where_it_is_until_the_end_of_the_lease(
    cluster: Callable[..., Cluster], content: Any, eventually: Any
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    value = content(b"k", 1, MIB)
    few.client.put("k", value, policy=few.on(0))
    source, target = few.owners[0].segment_id, few.owners[1].segment_id
    reader = few.client.open_value("k")
    few.client.move("k", source, target)
    assert few.master.report().segments[0].leased_bytes == MIB
    eventually(lambda: few.owners[0].drain(timeout_s=0.05).reading == 1)
    assert not few.owners[0].drain(timeout_s=0.05).done, "it would be a miss for who reads"
    assert few.client.get("k") == value  # from where it lies now
    reader.give_up()
    assert few.owners[0].drain(timeout_s=10.0).done


def test_hot_values_are_replicated_and_one_replica_is_enough_again_later(
    cluster: Callable[..., Cluster], content: Any, eventually: Any
) -> None:
    few = cluster(16 * MIB, 16 * MIB, 16 * MIB)
    few.fill(content, 0)
    assert few.client.replicate([*KEYS[:3], "unknown"], 3) == [CopyOutcome.STORED] * 3 + [CopyOutcome.GONE]
    assert [set(found or ()) for found in few.client.batch_replicas(KEYS[:3])] == [few.ids(0, 1, 2)] * 3
    assert few.client.replicate(KEYS[:1], 4, timeout_s=5.0) == [CopyOutcome.NOWHERE]
    assert few.client.replicate(KEYS[:2], 1) == [CopyOutcome.STORED] * 2
    assert [len(found or ()) for found in few.client.batch_replicas(KEYS[:3])] == [1, 1, 3]
    assert few.all_right(content)


def test_a_replica_lost_with_its_owner_is_made_anew(
    cluster: Callable[..., Cluster], content: Any, eventually: Any
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    few.fill(content, 0, replicas=2)
    few.owners[1].close()
    assert few.client.replicas(KEYS[0]) == [few.owners[0].segment_id]
    few.owners.append(few.owner(16 * MIB))
    eventually(lambda: all(set(one or ()) == few.ids(0, 2) for one in few.client.batch_replicas(KEYS)))
    few.owners[0].close()
    assert few.all_right(content)


def test_a_second_replica_never_makes_another_value_leave_unasked(
    cluster: Callable[..., Cluster], content: Any, eventually: Any
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    few.fill(content, 0, replicas=2)
    few.owners[1].close()
    few.owners.append(few.owner(6 * MIB))
    single = [f"single-{number}" for number in range(4)]
    for key in single:
        few.client.put(key, content(key.encode(), 1, MIB), policy=few.on(2))
    eventually(lambda: few.client.stats().copied == 2)
    assert few.client.batch_exist([*KEYS, *single]) == [True] * 16
    assert few.client.stats().evicted == 0


def test_a_drained_segment_is_empty_and_nothing_is_lost(
    cluster: Callable[..., Cluster], content: Any
) -> None:
    few = cluster(16 * MIB, 10 * MIB, 10 * MIB)
    few.fill(content, 0)
    few.client.put("two", content(b"two", 1, MIB), policy=few.on(0, replicas=2))
    few.client.put("empty", b"")
    few.client.pin(KEYS[0])
    shown = few.owners[0].drain(timeout_s=20.0)
    assert (shown.done, shown.reasons) == (True, {}), shown
    assert shown.moved >= len(KEYS)
    few.client.put("new", bytes(MIB), policy=few.on(0))
    assert few.client.replicas("new") != [few.owners[0].segment_id], "it takes nothing new"
    few.owners[0].close()
    assert few.all_right(content)
    assert few.client.get("two") == content(b"two", 1, MIB)
    assert few.client.get("empty") == b""
    stats = few.client.stats()
    assert (stats.evicted, stats.lost) == (0, 0)


def test_a_drain_without_room_leaves_what_would_be_evicted_first(
    cluster: Callable[..., Cluster], content: Any
) -> None:
    few = cluster(16 * MIB, 8 * MIB)
    few.fill(content, 0)
    for _ in range(3):  # used often: the last to be evicted
        assert [few.client.get(key) is not None for key in KEYS[:5]]
    shown = few.owners[0].drain(timeout_s=20.0)
    assert shown.done, shown
    few.owners[0].close()
    assert few.client.batch_exist(KEYS[:5]) == [True] * 5
    stats = few.client.stats()
    assert stats.lost == 0
    assert 4 <= stats.evicted <= 6


def test_the_last_segment_says_at_once_that_nothing_can_be_moved(
    cluster: Callable[..., Cluster], content: Any
) -> None:
    few = cluster(16 * MIB)
    few.fill(content, 0)
    began_s = time.monotonic()
    shown = few.owners[0].drain(timeout_s=60.0)
    assert time.monotonic() - began_s < 30.0
    assert (shown.done, shown.stuck, shown.left) == (False, True, len(KEYS))
    assert shown.reasons == {"NOWHERE": len(KEYS)}
    assert few.all_right(content)
    few.owners[0].stop_draining()
    few.client.put("k", b"1")
    assert few.client.replicas("k") == [few.owners[0].segment_id]


def test_a_drain_goes_on_at_the_next_master(
    world: Any, fast: StoreConfig, content: Any, eventually: Any
) -> None:
    config = msgspec.structs.replace(fast, recovery=True, heartbeat_s=0.05)
    engine = world.engine("tcp")
    master = Master(engine, config)
    owners = [world.store(world.engine("tcp"), engine.address, lend=16 * MIB, config=config) for _ in "ab"]
    client = world.store(world.engine("tcp"), engine.address, config=config)
    for key in KEYS:
        policy = PutPolicy(preferred_segments=(owners[0].segment_id,))
        client.put(key, content(key.encode(), 1, MIB), policy=policy)
    reader = client.open_value(KEYS[0])
    shown: list[Any] = []
    thread = threading.Thread(target=lambda: shown.append(owners[0].drain(timeout_s=30.0)))
    thread.start()
    eventually(lambda: client.stats().copied > 0)
    eventually(lambda: not any(store._member._notices._ledger.seen == 0 for store in owners))
    master.close()
    world.stack.enter_context(Master(engine, config))
    reader.give_up()
    thread.join(40.0)
    assert [one.done for one in shown] == [True]
    owners[0].close()
    eventually(lambda: has_master(client))  # until it is back, its calls say that the master is away
    assert all(client.get(key) == content(key.encode(), 1, MIB) for key in KEYS)


def test_what_cannot_be_copied_says_why(cluster: Callable[..., Cluster], content: Any) -> None:
    few = cluster(16 * MIB, 2 * MIB)
    few.client.put("k", content(b"k", 1, 3 * MIB), policy=few.on(0))
    one, two = (owner.segment_id for owner in few.owners)
    with pytest.raises(errors.CopyFailed, match="no room"):
        few.client.copy("k", two)
    with pytest.raises(errors.CopyFailed, match="no segment may take it"):
        few.client.copy("k", 12345)
    with pytest.raises(errors.KeyNotFound):
        few.client.copy("unknown", two)
    with pytest.raises(errors.KeyNotFound):
        few.client.move("k", two, one)
    with pytest.raises(errors.ConfigError):
        few.client.move("k", one, one)
    with pytest.raises(errors.ConfigError):
        few.client.replicate(["k"], 17)
    assert few.client.replicate([], 2) == []
    with pytest.raises(errors.KeyNotFound):
        few.client.replicas("unknown")
    assert few.client.get("k") == content(b"k", 1, 3 * MIB)


@pytest.mark.parametrize("error", [MemoryUnavailable, KeyError], ids=["no memory for it", "a mistake"])
def test_a_copy_that_an_error_ends_is_none(
    cluster: Callable[..., Cluster],
    content: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    few = cluster(3 * MIB, 3 * MIB)
    value = content(b"k", 1, 5 * MIB)
    few.client.put("k", value)
    few.owners.append(few.owner(16 * MIB))
    sources = set(few.client.replicas("k"))
    assert sources == few.ids(0, 1), "its copies go through memory of their own"

    def refuse(nbytes: int, **_: Any) -> Any:
        raise error(f"{nbytes} bytes are not to be had")

    for owner in few.owners[:2]:
        monkeypatch.setattr(owner._engine, "allocate", refuse)
        monkeypatch.setattr(owner._copier, "_run", _quietly(owner._copier._run, KeyError))
    with pytest.raises(errors.CopyFailed, match="could not be moved"):
        few.client.copy("k", few.owners[2].segment_id)
    assert set(few.client.replicas("k")) == sources
    assert few.client.get("k") == value


class Stuck:
    """A transfer that does not move until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def wait(self, timeout_s: float) -> None:
        if self.cancelled.wait(timeout_s):
            raise TransferCancelled("as it was told")
        raise TransferTimeout(f"not within {timeout_s} s")

    def wait_for_ever(self) -> None:
        self.cancelled.wait()
        raise TransferCancelled("as it was told")


def test_an_owner_in_a_hurry_gives_up_the_copies_that_are_on_their_way(
    cluster: Callable[..., Cluster], content: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    few.fill(content, 0)
    owner, begun = few.owners[0], list[Stuck]()

    def write(*_: Any, **__: Any) -> Stuck:
        begun.append(Stuck())
        return begun[-1]

    monkeypatch.setattr(owner._engine, "write", write)
    owner.drain(timeout_s=0.0)
    eventually(lambda: begun)
    owner.close(copies_wait_s=0.0)
    assert [stuck.cancelled.is_set() for stuck in begun] == [True]
    assert not owner._copier._thread.is_alive()


def test_an_owner_that_closes_is_in_a_hurry_as_soon_as_it_is_told(
    cluster: Callable[..., Cluster], content: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = cluster(16 * MIB, 16 * MIB)
    few.fill(content, 0)
    owner, hurry, begun = few.owners[0], threading.Event(), list[Stuck]()

    def write(*_: Any, **__: Any) -> Stuck:
        begun.append(Stuck())
        return begun[-1]

    monkeypatch.setattr(owner._engine, "write", write)
    monkeypatch.setattr(Stuck, "wait", lambda self, timeout_s: Stuck.wait_for_ever(self))
    owner.drain(timeout_s=0.0)
    eventually(lambda: begun)
    closing = threading.Thread(target=owner.close, kwargs={"copies_wait_s": 1000.0, "hurry": hurry})
    closing.start()
    assert not begun[0].cancelled.wait(0.2), "nobody is in a hurry yet"
    hurry.set()
    closing.join(60.0)
    assert not closing.is_alive()
    assert begun[0].cancelled.is_set()


def _quietly(run: Callable[[], None], mistake: type[Exception]) -> Callable[[], None]:
    def guarded() -> None:
        with contextlib.suppress(mistake):
            run()

    return guarded
