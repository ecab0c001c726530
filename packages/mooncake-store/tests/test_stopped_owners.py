"""Owners that are stopped, and say neither yes nor no: reads and writes end by the time set for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_store import PutPolicy, StoreConfig, errors
from mooncake_store.parts import SEGMENT
from mooncake_store.time_budget import SLOWEST_BYTES_PER_S, TimeBudget
from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.stopping import stopped_process

KIB, MIB = 1 << 10, 1 << 20
NBYTES = 100 * KIB
LONG_S = 20.0  # nothing here takes so long by itself


@pytest.fixture
def settings(fast: StoreConfig) -> Callable[..., StoreConfig]:
    """Settings in which nothing ends a put or get but the time for moving bytes, which is long."""

    def make(**fields: Any) -> StoreConfig:
        given = {"transfer_timeout_s": 1000.0, "reservation_ttl_s": 900.0, "client_ttl_s": 60.0, **fields}
        return msgspec.structs.replace(fast, **given)

    return make


def test_a_try_leaves_half_of_the_time_to_those_that_may_follow() -> None:
    now_s = [100.0]
    budget = TimeBudget(8.0, lambda: now_s[0])
    assert budget.begin(0, tries=3) == 104.0
    now_s[0] = 101.0
    budget.end()
    now_s[0] = 110.0  # between two tries, no time is taken
    assert budget.begin(0, tries=2) == 113.5
    now_s[0] = 113.5
    budget.end()
    assert budget.begin(0, tries=1) == 117.0
    now_s[0] = 200.0
    budget.end()
    assert budget.begin(0, tries=1) == 200.0


def test_large_values_have_time_by_their_size_besides() -> None:
    now_s = [100.0]
    budget = TimeBudget(8.0, lambda: now_s[0])
    assert budget.begin(3 * SLOWEST_BYTES_PER_S, tries=2) == 107.0
    now_s[0] = 103.0
    budget.end()
    assert budget.begin(0, tries=1) == 111.0


class Fakes:
    """A master's store, owners of memory and a client, all of this process; owners can be frozen."""

    def __init__(
        self, world: Any, fabric: FakeFabric, settings: Callable[..., StoreConfig], owners: int
    ) -> None:
        self.fabric, self.world, self._settings = fabric, world, settings
        self._master = self._engine("master")
        world.store(self._master, config=settings())
        engines = [self._engine(f"owner-{n}") for n in range(owners)]
        self.owners = [
            world.store(engine, self._master.address, lend=4 * MIB, config=settings()) for engine in engines
        ]
        self.engine = self._engine("client")
        for engine in engines:  # so that short times need not do for that
            self.engine.connect(engine.address)
        self.client = self.another()

    def another(self, **fields: Any) -> Any:
        """One more client, of the same engine."""
        return self.world.store(self.engine, self._master.address, config=self._settings(**fields))

    def _engine(self, host: str) -> Any:
        return self.world.stack.enter_context(TransferEngine(self.fabric.config(host)))

    def on(self, owner: int) -> PutPolicy:
        return PutPolicy(preferred_segments=(self.owners[owner].segment_id,))

    @contextmanager
    def frozen(self, owner: int) -> Iterator[None]:
        device = self.fabric.device(f"owner-{owner}")
        device.freeze()
        try:
            yield
        finally:
            device.thaw()


@pytest.fixture
def fakes(world: Any, settings: Callable[..., StoreConfig]) -> Callable[..., Fakes]:
    fabric = world.stack.enter_context(FakeFabric())
    return lambda owners: Fakes(world, fabric, settings, owners)


def test_a_read_from_a_silent_owner_is_a_miss_that_is_counted_and_said(
    fakes: Callable[..., Fakes], content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    there = fakes(owners=1)
    owner, hasty = there.owners[0], there.another(transfer_timeout_s=0.3)
    there.client.put("k", content(b"k", 1, NBYTES))
    with there.frozen(0), pytest.raises(errors.KeyNotFound):
        hasty.get("k")
    assert (hasty.numbers().misses, hasty.numbers().hits) == (1, 0)
    mover = [record for record in caplog.records if record.name == "mooncake_store.mover"]
    (said,) = [record.getMessage() for record in mover if record.levelno == logging.WARNING]
    assert f"segment {owner.segment_id:x}" in said
    assert owner.engine.address in said
    assert "did not finish within" in said
    assert there.client.get("k") == content(b"k", 1, NBYTES)


def test_a_read_goes_on_to_another_replica_when_the_nearest_is_silent(
    fakes: Callable[..., Fakes], content: Any
) -> None:
    there = fakes(owners=2)
    there.client.put("k", content(b"k", 1, NBYTES), policy=PutPolicy(replicas=2))
    hasty = there.another(transfer_timeout_s=8.0)  # half of it for the first
    nearest = there.client._read(["k"])
    with nearest:
        (silent,) = set(
            np.frombuffer(nearest._located.placement.rows, dtype="<u8").reshape(-1, 5)[:, SEGMENT]
        )
    with there.frozen([owner.segment_id for owner in there.owners].index(silent)):
        assert hasty.get("k") == content(b"k", 1, NBYTES)


def test_a_put_goes_to_another_segment_when_the_preferred_one_is_silent(
    fakes: Callable[..., Fakes], content: Any
) -> None:
    there = fakes(owners=2)
    with there.frozen(0):
        there.another(transfer_timeout_s=8.0).put("k", content(b"k", 1, NBYTES), policy=there.on(0))
        assert there.client.get("k") == content(b"k", 1, NBYTES)
        # With nowhere else to go it says why.
        with there.frozen(1), pytest.raises(errors.PutFailed, match="did not finish within"):
            there.another(transfer_timeout_s=0.3).put("other", bytes(NBYTES))
    assert not there.client.exist("other")


def test_large_values_move_for_as_long_as_a_slow_link_takes(
    fakes: Callable[..., Fakes], content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = fakes(owners=1)
    there.fabric.device("client").slow(bandwidth=8 * MIB)
    hasty = there.another(transfer_timeout_s=0.05)
    value = content(b"k", 1, 2 * MIB)  # in 0.25 s
    with pytest.raises(errors.PutFailed):
        hasty.put("k", value)
    monkeypatch.setattr("mooncake_store.time_budget.SLOWEST_BYTES_PER_S", 2 * MIB / LONG_S)
    hasty._quick = None  # which has a constant of its own
    hasty.put("k", value)
    assert hasty.get("k") == value


def test_a_session_waits_for_a_silent_owner_once(fakes: Callable[..., Fakes], content: Any) -> None:
    there = fakes(owners=1)
    client, keys, size = there.another(transfer_timeout_s=0.3), [f"{n}" for n in range(50)], 1000
    region = there.world.region(there.engine, bytes(50 * size))
    starts = np.arange(50) * size
    assert all(there.client.batch_put_from(keys, region, starts, size))
    counters = there.fabric.device("client").counters
    with there.frozen(0):
        begun = counters().operations
        with client.read_session(keys) as reading:
            for number in range(50):
                reading.read_parts(region, [[number, 0, number * size, size]])
        assert counters().operations == begun + 1
        assert not reading.good.any()
        with client.write_session([f"new-{key}" for key in keys], size) as writing:
            for number in range(50):
                writing.write_parts(region, [[number, 0, number * size, size]])
        assert counters().operations == begun + 2
        assert not writing.stored.any()


def test_what_moves_ends_when_the_master_says_that_the_segment_is_gone(
    fakes: Callable[..., Fakes], content: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    there = fakes(owners=2)
    client = there.client
    for number in range(2):
        client.put(f"{number}", content(b"%d" % number, 1, NBYTES), policy=there.on(number))
    got: dict[str, object] = {}

    def read() -> None:
        try:
            got["value"] = client.get("0")
        except errors.KeyNotFound as error:
            got["value"] = error

    with there.frozen(0):
        reader = threading.Thread(target=read)
        reader.start()
        device = there.fabric.device("client")
        eventually(lambda: device.counters().in_flight == 1)
        # What the master said before the read began does not count.
        client._mover.keep_only({there.owners[1].segment_id}, time.monotonic() - LONG_S)
        assert device.counters().cancels == 0
        there.owners[0]._member.close()
        reader.join(LONG_S)
        assert not reader.is_alive()
    assert isinstance(got["value"], errors.KeyNotFound)
    assert "the master has segment" in caplog.text
    assert client.get("1") == content(b"1", 1, NBYTES)


class Processes:
    """A store with its master, and an owner in a process of its own; clients are of one engine."""

    def __init__(self, world: Any, driver: str, settings: Callable[..., StoreConfig], ttl_s: float) -> None:
        self.world, self._settings = world, settings
        config = settings(client_ttl_s=ttl_s)
        self.master = world.engine(driver)
        world.store(self.master, config=config)
        self.owner = world.child(
            drivers=[driver], master=self.master.address, lend=4 * MIB, config=msgspec.to_builtins(config)
        )
        self.engine = world.engine(driver)
        self.client = self.another()

    def another(self, **fields: Any) -> Any:
        """One more client."""
        return self.world.store(self.engine, self.master.address, config=self._settings(**fields))


@pytest.fixture
def processes(world: Any, settings: Callable[..., StoreConfig]) -> Callable[..., Processes]:
    return lambda driver, ttl_s=60.0: Processes(world, driver, settings, ttl_s)


def test_a_stopped_process_is_a_miss_in_time_and_a_place_for_nothing(
    processes: Callable[..., Processes], content: Any
) -> None:
    there, value = processes("tcp"), content(b"k", 1, NBYTES)
    there.client.put("k", value)
    hasty = there.another(transfer_timeout_s=0.3)
    began_s = time.monotonic()
    with stopped_process(there.owner.process.pid):
        with pytest.raises(errors.KeyNotFound):
            hasty.get("k")
        with pytest.raises(errors.PutFailed, match="did not finish within"):
            hasty.put("other", value)
    assert time.monotonic() - began_s < LONG_S
    assert there.client.get("k") == value


def test_a_read_of_a_stopped_process_ends_when_the_master_has_given_it_up(
    processes: Callable[..., Processes], content: Any
) -> None:
    there = processes("tcp", ttl_s=5.0)
    there.client.put("k", content(b"k", 1, NBYTES))
    began_s = time.monotonic()
    with stopped_process(there.owner.process.pid), pytest.raises(errors.KeyNotFound):
        there.client.get("k")
    assert time.monotonic() - began_s < LONG_S


def test_memory_mapped_from_a_stopped_process_is_read_and_written(
    processes: Callable[..., Processes], content: Any
) -> None:
    there, value = processes("shm"), content(b"k", 1, NBYTES)
    there.client.put("k", value)
    with stopped_process(there.owner.process.pid):
        assert there.client.get("k") == value
        there.client.put("other", value)
        assert there.client.get("other") == value
