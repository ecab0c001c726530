"""Several rails to one peer: aggregation, failures, the breaker, slow rails, fallback between drivers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from mooncake_transfer import RailConfig, RailStatus, Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import NoRoute, PeerUnreachable
from mooncake_transfer.log_format import fields_of
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

MIB = 1 << 20
DEADLINE_S = 20.0


class Pair:
    """Two engines with several fake devices each."""

    def __init__(self, stack: ExitStack, nbytes: int, **settings: Any) -> None:
        drivers = settings.pop("drivers", None)
        devices = settings.pop("devices", 2)
        options = settings.pop("options", None)
        self.fabric = stack.enter_context(FakeFabric(drivers=drivers))
        config = self.fabric.config
        self.near = stack.enter_context(
            TransferEngine(config("near", devices=devices, options=options, **settings))
        )
        self.far = stack.enter_context(TransferEngine(config("far", devices=devices, options=options)))
        self.local: Region = self.near.allocate(nbytes)
        self.owned: Region = self.far.allocate(nbytes, name="kv")
        self.remote: RemoteRegion = self.near.import_region(self.owned.descriptor())
        self.nbytes = nbytes
        np.frombuffer(self.local.view(), dtype=np.uint8)[:] = np.resize(
            np.arange(251, dtype=np.uint8), nbytes
        )

    def write(self, **options: Any) -> Transfer:
        return self.near.write(self.local, self.remote, [[0, 0, self.nbytes]], **options)

    def check_written(self) -> None:
        assert np.array_equal(bytes_of(self.owned), bytes_of(self.local))

    def rail(self, device: str, remote: str) -> RailStatus:
        return next(
            rail for rail in self.near.rails() if (rail.device, rail.remote_device) == (device, remote)
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_transfer_is_spread_over_every_pair_of_like_devices(stack: ExitStack) -> None:
    pair = Pair(stack, 32 * MIB, devices=4)
    transfer = pair.write()
    transfer.wait(DEADLINE_S)
    pair.check_written()
    shares = transfer.bytes_by_rail
    assert set(shares) == {f"fake fake{i} -> fake{i}" for i in range(4)}
    assert sum(shares.values()) == 32 * MIB
    assert min(shares.values()) > 4 * MIB


def test_small_transfers_are_not_cut(stack: ExitStack) -> None:
    pair = Pair(stack, 256 << 10)
    pair.write().wait(DEADLINE_S)
    assert sum(rail.ops for rail in pair.near.rails()) == 1


def test_a_faster_rail_gets_more(stack: ExitStack) -> None:
    rails = RailConfig(probe_every=0, slice_bytes=256 << 10)
    pair = Pair(stack, 8 * MIB, rails=rails, options={"in_flight_bytes": MIB})
    # So slow that a slice takes longer than a busy machine keeps a thread from its core.
    pair.fabric.device("near", 0).slow(bandwidth=3e7)
    pair.fabric.device("near", 1).slow(bandwidth=1e7)
    for _ in range(3):
        transfer = pair.write()
        transfer.wait(DEADLINE_S)
    shares = transfer.bytes_by_rail
    assert shares["fake fake0 -> fake0"] > 1.3 * shares["fake fake1 -> fake1"]


def test_a_rail_over_four_times_slower_is_only_probed_and_comes_back(stack: ExitStack) -> None:
    pair = Pair(stack, 4 * MIB, rails=RailConfig(probe_every=10, slice_bytes=128 << 10))
    slow = pair.fabric.device("near", 1)
    pair.fabric.device("near", 0).slow(bandwidth=2e8)
    slow.slow(bandwidth=1e7)
    for _ in range(6):
        pair.write().wait(DEADLINE_S)
    before = pair.rail("fake1", "fake1")
    assert before.bandwidth_bytes_per_s * 4 < pair.rail("fake0", "fake0").bandwidth_bytes_per_s
    transfer = pair.write()
    transfer.wait(DEADLINE_S)
    assert 0 <= transfer.bytes_by_rail.get("fake fake1 -> fake1", 0) < MIB // 2
    slow.slow(bandwidth=2e8)

    def it_is_used_again() -> bool:
        again = pair.write()
        again.wait(DEADLINE_S)
        return again.bytes_by_rail.get("fake fake1 -> fake1", 0) > MIB

    wait_until(it_is_used_again, "probes show that the rail is fast again")


def test_slices_of_a_rail_that_dies_go_on_elsewhere(stack: ExitStack) -> None:
    pair = Pair(stack, 32 * MIB)
    device = pair.fabric.device("near", 1)
    for index in range(2):
        pair.fabric.device("near", index).slow(bandwidth=1e9)
    transfer = pair.write()
    wait_until(lambda: device.counters().completed > 0, "both rails are in use")
    device.die()
    transfer.wait(DEADLINE_S)
    pair.check_written()
    assert pair.rail("fake1", "fake1").errors > 0
    assert pair.rail("fake1", "fake1").retries > 0


def test_a_spare_combination_of_devices_is_used_when_the_usual_ones_are_cut(stack: ExitStack) -> None:
    pair = Pair(stack, MIB)
    near, far = (lambda i: pair.fabric.device("near", i)), (lambda i: pair.fabric.device("far", i))
    for index in range(2):
        near(index).cut(far(index))
    transfer = pair.write()
    transfer.wait(DEADLINE_S)
    pair.check_written()
    assert set(transfer.bytes_by_rail) <= {"fake fake0 -> fake1", "fake fake1 -> fake0"}


def test_a_burst_of_failures_is_one_incident_and_three_incidents_open_the_breaker(stack: ExitStack) -> None:
    # Long enough for two writes on a busy machine.
    rails = RailConfig(breaker_pause_s=5, breaker_max_pause_s=5, suspect_pause_s=0.001, probe_every=0)
    pair = Pair(stack, 8 * MIB, rails=rails)
    for index in range(2):  # no faster than they claim, or the other one seems too slow to be used at all
        pair.fabric.device("near", index).slow(bandwidth=1e9)
    device = pair.fabric.device("near", 1)
    device.die()
    pair.write().wait(DEADLINE_S)
    assert pair.rail("fake1", "fake1").state in ("suspect", "closed")

    def it_opened() -> bool:
        pair.write().wait(DEADLINE_S)
        return pair.rail("fake1", "fake1").state == "open"

    wait_until(it_opened, "three incidents")
    taken = device.counters().operations
    pair.write().wait(DEADLINE_S)
    assert device.counters().operations == taken  # nothing is tried while the breaker is open
    device.revive()

    def it_closed() -> bool:
        pair.write().wait(DEADLINE_S)
        return pair.rail("fake1", "fake1").state == "closed"

    wait_until(it_closed, "a trial after the pause succeeds")
    pair.check_written()


def test_a_rail_that_seems_far_too_slow_is_tried_by_the_next_transfer_after_its_pause(
    stack: ExitStack,
) -> None:
    rails = RailConfig(breaker_errors=1, breaker_pause_s=0.2, probe_every=0)
    claimed = 10_000_000  # of which the other rail moves a hundred times more
    pair = Pair(stack, 4 * MIB, rails=rails, options={"bandwidth": claimed})
    device = pair.fabric.device("near", 1)
    device.die()

    def it_seems_slow() -> bool:
        pair.write().wait(DEADLINE_S)
        return pair.rail("fake0", "fake0").bandwidth_bytes_per_s > 8 * claimed

    wait_until(it_seems_slow, "the other rail is far faster than this one claims")
    wait_until(lambda: pair.rail("fake1", "fake1").state == "half-open", "the pause is over")
    device.revive()
    pair.write().wait(DEADLINE_S)
    assert pair.rail("fake1", "fake1").state == "closed"
    pair.check_written()


def test_only_one_slice_tries_a_rail_after_its_pause(stack: ExitStack) -> None:
    rails = RailConfig(breaker_errors=1, breaker_pause_s=0.2, breaker_max_pause_s=0.2, probe_every=0)
    pair = Pair(stack, 8 * MIB, rails=rails)
    device = pair.fabric.device("near", 1)
    device.die()
    pair.write().wait(DEADLINE_S)
    wait_until(lambda: pair.rail("fake1", "fake1").state == "half-open", "the pause is over")
    device.revive()
    device.freeze()  # so the trial does not end
    tried = device.counters().operations
    transfer = pair.write()
    wait_until(lambda: transfer.bytes_done >= 8 * MIB - (64 << 10), "the other rail moves the rest")
    assert device.counters().operations - tried == 1
    device.thaw()
    transfer.wait(DEADLINE_S)
    assert pair.rail("fake1", "fake1").state == "closed"
    pair.check_written()


def test_one_slice_in_a_hundred_probes_and_the_slow_rail_has_every_second_of_them(stack: ExitStack) -> None:
    pair = Pair(stack, 2 * MIB, rails=RailConfig(slice_bytes=64 << 10))
    pair.fabric.device("near", 1).slow(bandwidth=1e7)

    def slices() -> tuple[int, int]:
        return pair.rail("fake0", "fake0").ops, pair.rail("fake1", "fake1").ops

    def it_is_cut_off() -> bool:
        pair.write().wait(DEADLINE_S)
        return pair.rail("fake1", "fake1").bandwidth_bytes_per_s < 2e7

    wait_until(it_is_cut_off, "the second rail is known to be slow")
    fast, slow = slices()
    for _ in range(62):
        pair.write().wait(DEADLINE_S)
    done, (_, slow_now) = sum(slices()), slices()
    assert done - fast - slow == 62 * 32
    expected = [nth for nth in range(fast + slow + 1, done + 1) if nth % 100 == 0 and nth // 100 % 2]
    assert slow_now - slow == len(expected)


def test_each_pause_of_a_rail_that_stays_dead_is_twice_the_last_one_up_to_the_longest(
    stack: ExitStack,
) -> None:
    rails = RailConfig(
        breaker_errors=1, breaker_pause_s=0.2, breaker_max_pause_s=0.8, suspect_pause_s=0.001, probe_every=0
    )
    pair = Pair(stack, 8 * MIB, rails=rails)
    pair.fabric.device("near", 1).die()

    def state() -> str:
        return pair.rail("fake1", "fake1").state

    began: list[float] = []

    def it_fails() -> bool:
        began.append(time.monotonic())
        pair.write().wait(DEADLINE_S)
        return state() == "open"

    pauses = []
    for _ in range(7):
        wait_until(it_fails, "a trial fails")
        wait_until(lambda: state() == "half-open", "the pause is over")
        pauses.append(time.monotonic() - began[-1])
    for pause, at_least in zip(pauses, (0.2, 0.4, *[0.8] * 5), strict=True):
        assert pause >= at_least, pauses
    assert pauses[-1] < 12.8, pauses  # that much it would be without a longest one
    pair.check_written()


def test_a_rail_that_fails_every_second_slice_is_paused(stack: ExitStack) -> None:
    rails = RailConfig(breaker_pause_s=30, suspect_pause_s=0.001, probe_every=0)
    pair = Pair(stack, 4096, rails=rails)  # too little to measure by, so the first rail stays first
    device = pair.fabric.device("near", 0)

    def write_until(counted: Callable[[], int], what: str) -> None:
        before = counted()

        def it_counts() -> bool:
            pair.write().wait(DEADLINE_S)
            return counted() > before

        wait_until(it_counts, what)

    for _ in range(3):
        write_until(lambda: device.counters().completed, "it succeeds")
        assert pair.rail("fake0", "fake0").state != "open"
        device.fail(next=1)
        write_until(lambda: pair.rail("fake0", "fake0").errors, "it fails")
    assert pair.rail("fake0", "fake0").state == "open"
    pair.check_written()


def test_a_paused_rail_is_tried_all_the_same_when_there_is_no_other(stack: ExitStack) -> None:
    pair = Pair(stack, MIB, devices=1, rails=RailConfig(breaker_errors=1, attempts=1))
    device = pair.fabric.device("near", 0)
    device.die()
    with pytest.raises(PeerUnreachable):
        pair.write().wait(DEADLINE_S)
    assert pair.rail("fake0", "fake0").state == "open"
    device.revive()
    pair.write().wait(DEADLINE_S)
    assert pair.rail("fake0", "fake0").state == "closed"


def test_the_next_driver_takes_over_and_the_reason_is_logged_once(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(stack, 8 * MIB, drivers={"fast": 60, "plain": 50}, devices=1)
    pair.fabric.device("near", driver="fast").die()
    with caplog.at_level(logging.WARNING, logger="mooncake_transfer.rails"):
        for _ in range(3):
            transfer = pair.write()
            transfer.wait(DEADLINE_S)
        wait_until(lambda: len(caplog.records) > 0, "the fallback is logged")
    assert transfer.bytes_by_driver == {"plain": 8 * MIB}
    pair.check_written()
    (record,) = [record for record in caplog.records if "near.fast0" in record.getMessage()]
    assert record.__dict__["peer"] == pair.far.address
    assert record.__dict__["rail"] == "fast fast0 -> fast0"
    assert record.__dict__["region"] == "kv"
    assert {"peer", "rail", "region", "event"} <= fields_of(record).keys()


def test_a_slower_driver_gets_nothing_while_the_faster_one_works(stack: ExitStack) -> None:
    pair = Pair(stack, 32 * MIB, drivers={"fast": 60, "plain": 50}, devices=1)
    transfer = pair.write()
    transfer.wait(DEADLINE_S)
    assert transfer.bytes_by_driver == {"fast": 32 * MIB}


def test_what_no_driver_can_do_is_no_route_with_every_reason(stack: ExitStack) -> None:
    pair = Pair(stack, MIB, drivers={"fast": 60, "plain": 50}, devices=1)
    for driver in ("fast", "plain"):
        pair.fabric.device("near", driver=driver).fail(next=1, status="unsupported")
    with pytest.raises(NoRoute, match=r"fast.*plain"):
        pair.write().wait(DEADLINE_S)


def test_memory_of_the_rails_own_node_is_preferred(stack: ExitStack) -> None:
    pair = Pair(stack, 16 * MIB, rails=RailConfig(probe_every=0), options={"numa_nodes": "0,1"})
    pair.near._core.set_numa_distances([[10, 40], [40, 10]])
    for index in range(2):
        pair.fabric.device("near", index).slow(bandwidth=1e9)
    pair.local.close()
    pair.local = pair.near._register(lambda _: _on_node(pair, 1), "near-node-1")
    for _ in range(2):
        transfer = pair.write()
        transfer.wait(DEADLINE_S)
    shares = transfer.bytes_by_rail
    assert shares["fake fake1 -> fake1"] > 1.3 * shares.get("fake fake0 -> fake0", 0)


def _on_node(pair: Pair, node: int) -> Any:
    from mooncake_transfer.memory import allocate_shareable

    memory = allocate_shareable(pair.nbytes, "on a node")
    memory.numa_node = node
    return memory
