"""Devices of the fake driver do what a test tells them to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_transfer import RailConfig, Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import (
    ConfigError,
    DriverUnavailable,
    PeerUnreachable,
    RegionRefused,
    TransferError,
    TransferTimeout,
)
from mooncake_transfer.memory import FileSource
from mooncake_transfer.testing.fake import FakeDevice, FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until
from mooncake_transfer.testing.pattern import pattern

NBYTES = 1 << 16
DEADLINE_S = 20.0
ALL = [[0, 0, NBYTES]]
ONE_ROUND = {"rails": RailConfig(attempts=1)}  # the tests look at what the driver itself says


class Pair:
    """Two engines of one fabric, a region of each, and the device of each."""

    def __init__(self, fabric: FakeFabric, stack: ExitStack, **options: Any) -> None:
        self.fabric = fabric
        self.left = stack.enter_context(TransferEngine(fabric.config("left", options=options, **ONE_ROUND)))
        self.right = stack.enter_context(TransferEngine(fabric.config("right", options=options, **ONE_ROUND)))
        self.near: FakeDevice = fabric.device("left")
        self.far: FakeDevice = fabric.device("right")
        self.local: Region = self.left.allocate(NBYTES)
        owned = self.right.allocate(NBYTES)
        bytes_of(owned)[:] = pattern(1, NBYTES)
        self.remote: RemoteRegion = self.left.import_region(owned.descriptor())

    def read(self, blocks: Any = None) -> Transfer:
        return self.left.read(self.local, self.remote, ALL if blocks is None else blocks)

    def check_reads(self) -> None:
        bytes_of(self.local)[:] = 0
        self.read().wait(DEADLINE_S)
        assert np.array_equal(bytes_of(self.local), pattern(1, NBYTES))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(stack: ExitStack) -> Pair:
    return Pair(stack.enter_context(FakeFabric()), stack)


@pytest.fixture
def timed(stack: ExitStack) -> Pair:
    return Pair(stack.enter_context(FakeFabric(manual_clock=True)), stack)


def test_nothing_happens_before_a_manual_clock_is_advanced(timed: Pair) -> None:
    timed.near.slow(latency_s=2.0)
    timed.far.slow(latency_s=1.0)
    transfer = timed.read()
    wait_until(lambda: timed.near.counters().in_flight == 1, "the operation is taken")
    timed.fabric.advance(2.9)
    assert timed.near.counters().completed == 0
    timed.fabric.advance(0.2)
    transfer.wait(DEADLINE_S)
    assert timed.fabric.now_s == pytest.approx(3.1)


def test_the_slower_device_sets_the_bandwidth(timed: Pair) -> None:
    timed.near.slow(bandwidth=NBYTES)
    timed.far.slow(bandwidth=NBYTES / 4)
    transfers = [timed.read([[0, 0, NBYTES // 2]]) for _ in range(2)]
    wait_until(lambda: timed.near.counters().operations == 2, "both are taken")
    timed.fabric.advance(2.5)
    assert timed.near.counters().completed == 1
    timed.near.slow(bandwidth=0)  # the second is under way at the old one
    timed.far.slow(bandwidth=0)
    timed.fabric.advance(1.0)
    assert timed.near.counters().completed == 1
    timed.fabric.advance(0.6)
    for transfer in transfers:
        transfer.wait(DEADLINE_S)


def test_a_lost_operation_ends_by_the_deadline_of_who_waits(pair: Pair) -> None:
    pair.near.lose(rate=1.0)
    with pytest.raises(TransferTimeout):
        pair.read().wait(0.05)
    assert pair.near.counters().lost >= 1
    pair.near.lose(rate=0.0)
    pair.check_reads()


def test_injected_errors_reach_the_initiator(pair: Pair) -> None:
    pair.near.fail(rate=1.0)
    with pytest.raises(TransferError, match="injected"):
        pair.read().wait(DEADLINE_S)
    assert pair.near.counters().errors >= 1


@pytest.mark.parametrize("which", ["near", "far"])
def test_a_dead_device_ends_what_is_in_flight_and_may_come_back(pair: Pair, which: str) -> None:
    device: FakeDevice = getattr(pair, which)
    pair.near.slow(latency_s=3600)
    transfer = pair.read()
    wait_until(lambda: pair.near.counters().in_flight > 0, "it is in flight")
    device.die()
    with pytest.raises(PeerUnreachable, match="fake"):
        transfer.wait(DEADLINE_S)
    pair.near.slow(latency_s=0)
    with pytest.raises(PeerUnreachable):
        pair.read().wait(DEADLINE_S)
    device.revive()
    pair.check_reads()


def test_a_cut_link_is_unreachable_until_it_is_restored(pair: Pair) -> None:
    pair.near.cut(pair.far)
    with pytest.raises(PeerUnreachable, match="link"):
        pair.read().wait(DEADLINE_S)
    pair.near.restore(pair.far)
    pair.check_reads()


def test_a_frozen_device_finishes_when_it_thaws(pair: Pair) -> None:
    pair.far.freeze()
    transfer = pair.read()
    wait_until(lambda: pair.near.counters().in_flight == 1, "it is in flight")
    assert not transfer.done()
    pair.far.thaw()
    transfer.wait(DEADLINE_S)


def test_a_corrupted_operation_moves_one_wrong_bit(pair: Pair) -> None:
    pair.near.corrupt(next=1)
    pair.read().wait(DEADLINE_S)
    wrong = np.flatnonzero(bytes_of(pair.local) != pattern(1, NBYTES))
    assert len(wrong) == 1
    assert pair.near.counters().corrupted == 1
    pair.check_reads()


def test_counters_tell_what_a_device_was_asked_for(timed: Pair) -> None:
    blocks = [[0, 0, 100], [1000, 500, 200], [3000, 100, 300]]
    timed.near.record()
    transfer = timed.read(blocks)
    wait_until(lambda: timed.near.counters().operations == 3, "all are taken")
    timed.fabric.advance(0)
    transfer.wait(DEADLINE_S)
    counters = timed.near.counters()
    assert (counters.completed, counters.errors, counters.in_flight) == (3, 0, 0)
    assert (counters.in_flight_max, counters.in_flight_bytes_max, counters.bytes_read) == (3, 600, 600)
    assert 1 <= counters.doorbells <= counters.submits <= 3
    served = timed.near.served()
    assert [[one.local_offset, one.remote_offset, one.length] for one in served] == blocks
    assert {(one.peer, one.opcode, one.stream) for one in served} == {("right.fake0", "read", 0)}


def test_a_device_that_reorders_does_so_the_same_way_for_the_same_seed() -> None:
    def order(seed: int) -> list[int]:
        with ExitStack() as stack:
            pair = Pair(stack.enter_context(FakeFabric(seed=seed, manual_clock=True)), stack)
            pair.near.slow(bandwidth=1e6)
            pair.near.reorder()
            pair.near.record()
            transfer = pair.read([[n * 200, n * 200, 100] for n in range(16)])
            wait_until(lambda: pair.near.counters().operations == 16, "all are taken")
            pair.fabric.advance(1)
            transfer.wait(DEADLINE_S)
            return [one.local_offset for one in pair.near.served()]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) != order(1)


def test_an_engine_that_comes_back_under_its_name_is_another_peer(pair: Pair, stack: ExitStack) -> None:
    pair.right.close()
    stack.enter_context(TransferEngine(pair.fabric.config("right")))
    with pytest.raises(PeerUnreachable):
        pair.read().wait(DEADLINE_S)


def test_two_open_engines_are_not_the_same_host(pair: Pair) -> None:
    with pytest.raises(DriverUnavailable, match=r"left\.fake0 is open already"):
        TransferEngine(pair.fabric.config("left"))


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"latency": 1}, "latency"), ({"devices": 0}, "at least one"), ({"kinds": "dram,tape"}, "tape")],
)
def test_options_are_checked(options: dict[str, Any], fault: str) -> None:
    with FakeFabric() as fabric, pytest.raises(ConfigError, match=fault):
        TransferEngine(fabric.config("left", options=options, **ONE_ROUND))


def test_a_fabric_that_was_left_is_no_plugin_any_more() -> None:
    with FakeFabric(drivers={"fleeting": 3}) as fabric:
        config = fabric.config("left")
        TransferEngine(config).close()
    with pytest.raises(ConfigError, match="not installed"):
        TransferEngine(config)


def test_small_operations_may_complete_inside_submit(stack: ExitStack) -> None:
    pair = Pair(stack.enter_context(FakeFabric()), stack, inline_bytes=64)
    began = time.monotonic()
    for _ in range(100):
        pair.read([[0, 0, 64]]).wait(DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S
    assert pair.near.counters().completed == 100


def test_a_file_that_is_only_read_has_no_key_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 4096)
    with FakeFabric() as fabric:
        options = {"kinds": "dram,file"}
        owner = TransferEngine(fabric.config("owner", options=options))
        with owner, TransferEngine(fabric.config("reader", options=options)) as reader:
            region = owner.register(FileSource(path, writable=False), name="weights")
            for ask in (region.descriptor, region.grant, lambda: region.descriptor("w")):
                with pytest.raises(
                    ConfigError, match=r"'weights' is opened for reading only.*descriptor\('r'\)"
                ):
                    ask()
            remote, local = reader.import_region(region.descriptor("r")), reader.allocate(4096)
            reader.read(local, remote, [[0, 0, 4096]]).wait(DEADLINE_S)
            assert bytes(local.view()) == b"w" * 4096
            with pytest.raises(RegionRefused):
                reader.write(local, remote, [[0, 0, 4096]]).wait(DEADLINE_S)
    assert path.read_bytes() == b"w" * 4096
