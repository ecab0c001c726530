"""Prepared transfers, grids, futures, deadlines, priorities and notifications."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_transfer import (
    Caller,
    Grid,
    GridSide,
    RailConfig,
    Region,
    RemoteRegion,
    TransferConfig,
    TransferEngine,
    TransferState,
)
from mooncake_transfer.errors import (
    ConfigError,
    NoRoute,
    PeerUnreachable,
    RegionRefused,
    TransferCancelled,
    TransferTimeout,
)
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until
from mooncake_transfer.transfer import Priority

KIB = 1 << 10
MIB = 1 << 20
DEADLINE_S = 20.0


class Pair:
    """An engine with a local region, and the region of a peer it writes to."""

    def __init__(self, stack: ExitStack, near: TransferConfig, far: TransferConfig, nbytes: int) -> None:
        self.near = stack.enter_context(TransferEngine(near))
        self.far = stack.enter_context(TransferEngine(far))
        self.local: Region = self.near.allocate(nbytes)
        self.owned: Region = self.far.allocate(nbytes)
        self.remote: RemoteRegion = self.near.import_region(self.owned.descriptor())
        bytes_of(self.local)[:] = np.resize(np.arange(251, dtype=np.uint8), nbytes)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["shm", "tcp"])
def pair(stack: ExitStack, request: pytest.FixtureRequest) -> Pair:
    config = TransferConfig(drivers=(request.param,))
    return Pair(stack, config, config, 4 * MIB)


class Slow(Pair):
    """Over a fake device that moves one operation at a time and keeps few in flight."""

    def __init__(self, stack: ExitStack, nbytes: int = MIB, **settings: Any) -> None:
        self.fabric = stack.enter_context(FakeFabric())
        options = {"in_flight_ops": 2, "in_flight_bytes": 64 * KIB}
        near = self.fabric.config("near", options=options, **settings)
        super().__init__(stack, near, self.fabric.config("far"), nbytes)
        self.device = self.fabric.device("near")

    def rows(self, count: int, length: int = 4 * KIB) -> list[list[int]]:
        return [[2 * i * length, 2 * i * length, length] for i in range(count)]


def test_a_prepared_transfer_moves_what_is_there_at_each_post(pair: Pair) -> None:
    transfer = pair.near.prepare_write(pair.local, pair.remote, [[0, 4096, 8192]])
    assert transfer.status().state is TransferState.PREPARED
    for value in range(5):
        bytes_of(pair.local)[:8192] = value
        assert transfer.post() is transfer
        transfer.wait(DEADLINE_S)
        assert (bytes_of(pair.owned)[4096:12288] == value).all()
        assert transfer.status().state is TransferState.DONE
        assert transfer.bytes_done == 8192


def test_a_transfer_that_was_never_posted_is_not_waited_for(pair: Pair) -> None:
    transfer = pair.near.prepare_read(pair.local, pair.remote, [[0, 0, 64]])
    with pytest.raises(ConfigError, match="never posted"):
        transfer.wait(DEADLINE_S)


def test_a_running_transfer_is_not_posted_again(stack: ExitStack) -> None:
    pair = Slow(stack)
    pair.device.freeze()
    transfer = pair.near.write(pair.local, pair.remote, [[0, 0, 4096]])
    with pytest.raises(ConfigError, match="running already"):
        transfer.post()
    pair.device.thaw()
    transfer.wait(DEADLINE_S)


def test_a_failed_transfer_can_be_posted_again(stack: ExitStack) -> None:
    pair = Slow(stack, rails=RailConfig(attempts=1))
    transfer = pair.near.prepare_write(pair.local, pair.remote, [[0, 0, 4096]])
    pair.device.fail(next=1, status="unreachable")
    with pytest.raises(PeerUnreachable):
        transfer.post().wait(DEADLINE_S)
    assert transfer.status().state is TransferState.FAILED
    assert "fake" in transfer.status().failure
    transfer.post().wait(DEADLINE_S)
    assert transfer.status().failure == ""


def test_cancelling_many_operations_asks_the_driver_once_for_each(stack: ExitStack) -> None:
    fabric = stack.enter_context(FakeFabric())
    pair = Pair(stack, fabric.config("near"), fabric.config("far"), MIB)
    device = fabric.device("near")
    device.freeze()
    transfer = pair.near.write(pair.local, pair.remote, [[2 * i, 2 * i, 1] for i in range(2000)])
    wait_until(lambda: device.counters().in_flight == 2000, "the driver has all of them")
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.wait(DEADLINE_S)
    assert 2000 <= device.counters().cancels <= 4000


def test_one_lost_connection_does_not_fail_a_transfer(stack: ExitStack) -> None:
    pair = Slow(stack)
    pair.device.fail(next=1, status="unreachable")
    pair.near.write(pair.local, pair.remote, pair.rows(8)).wait(DEADLINE_S)
    assert sum(rail.retries for rail in pair.near.rails()) == 1


def test_a_grid_moves_what_its_rows_would(pair: Pair) -> None:
    rng = np.random.default_rng(7)
    local_index, remote_index = rng.permutation(64)[:20], rng.permutation(64)[:20]
    grid = Grid(
        local=GridSide(index=local_index, stride=2048, base=512, outer_stride=256 * KIB),
        remote=GridSide(index=remote_index, stride=4096, outer_stride=512 * KIB),
        length=1024,
        outer=4,
    )
    pair.near.write(pair.local, pair.remote, grid).wait(DEADLINE_S)
    expected = np.zeros(4 * MIB, dtype=np.uint8)
    source = bytes_of(pair.local)
    for outer in range(4):
        for ours, theirs in zip(local_index, remote_index, strict=True):
            begin, end = 512 + outer * 256 * KIB + ours * 2048, outer * 512 * KIB + theirs * 4096
            expected[end : end + 1024] = source[begin : begin + 1024]
    assert np.array_equal(bytes_of(pair.owned), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 2**63}, "outside"),
        ({"base": 4 * MIB - 1023}, "outside"),
        ({"outer_stride": 4 * MIB}, "outside"),
        ({"index": [-1]}, "negative"),
        ({"index": [0.5]}, "integers"),
        ({"index": [0, 1]}, "as many"),
        ({"stride": 2**64}, "2\\^64"),
        ({"base": -1}, "2\\^64"),
    ],
)
def test_a_grid_outside_its_regions_is_refused_before_anything_moves(
    pair: Pair, change: dict[str, Any], message: str
) -> None:
    sides = {"index": [2], "stride": 1024, **change}

    def write() -> None:
        grid = Grid(local=GridSide(**sides), remote=GridSide(index=[0], stride=0), length=1024, outer=2)
        pair.near.write(pair.local, pair.remote, grid)

    with pytest.raises((RegionRefused, ConfigError), match=message):
        write()
    assert not bytes_of(pair.owned).any()


def test_nothing_is_left_over_by_operation(pair: Pair) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def move(times: int) -> None:
        for _ in range(times):
            pair.near.write(pair.local, pair.remote, [[0, 0, 64]]).wait(DEADLINE_S)

    move(2_000)
    before = resident_bytes()
    move(20_000)
    # The smallest block that malloc gives has 32 bytes.
    assert resident_bytes() - before < 20_000 * 16


def test_a_hundred_thousand_blocks_need_no_object_each(pair: Pair) -> None:
    offsets = np.arange(100_000, dtype=np.uint64) * 40
    rows = np.stack([offsets, offsets[::-1], np.full(100_000, 32, dtype=np.uint64)], axis=1)
    transfer = pair.near.read(pair.local, pair.remote, rows)
    transfer.wait(60)
    assert transfer.status().blocks == 100_000
    assert transfer.bytes_done == 3_200_000


def test_a_future_and_an_awaited_transfer_end_alike(stack: ExitStack) -> None:
    pair = Slow(stack, rails=RailConfig(attempts=1))
    rows = pair.rows(4)
    assert pair.near.write(pair.local, pair.remote, rows).future().result(DEADLINE_S) is None
    pair.device.fail(next=1)
    failed = pair.near.write(pair.local, pair.remote, rows).future()
    assert failed.exception(DEADLINE_S) is not None

    async def both() -> None:
        await asyncio.gather(*(pair.near.write(pair.local, pair.remote, rows) for _ in range(3)))

    asyncio.run(both())


def test_a_deadline_ends_a_transfer_that_nobody_waits_for(stack: ExitStack) -> None:
    pair = Slow(stack)
    pair.device.freeze()
    transfer = pair.near.write(pair.local, pair.remote, pair.rows(16), deadline_s=0.1)
    wait_until(transfer.done, "the deadline passes")
    with pytest.raises(TransferTimeout, match=f"write to region .* of {pair.far.address}.*deadline.*fake0"):
        transfer.wait(0)
    pair.device.thaw()


def test_a_wait_that_times_out_names_the_peer_and_the_rail(stack: ExitStack) -> None:
    pair = Slow(stack)
    pair.device.freeze()
    transfer = pair.near.write(pair.local, pair.remote, pair.rows(16))
    with pytest.raises(
        TransferTimeout, match=f"of {pair.far.address}.*within 0.1 s.*over fake fake0 -> fake0"
    ):
        transfer.wait(0.1)
    pair.device.thaw()


def test_the_notification_comes_after_the_last_byte_and_before_the_end(pair: Pair) -> None:
    seen: list[tuple[bytes, bool]] = []

    def moved(payload: bytes, caller: Caller) -> None:
        assert caller.address == pair.near.address
        seen.append((payload, np.array_equal(bytes_of(pair.owned), bytes_of(pair.local))))

    pair.far.serve("moved", moved)
    for index in range(3):
        bytes_of(pair.local)[:] = index + 1
        name = b"%d" % index
        pair.near.write(pair.local, pair.remote, [[0, 0, 4 * MIB]], notify=("moved", name)).wait(DEADLINE_S)
        wait_until(lambda: len(seen) > index, "the notification arrives")  # noqa: B023 - called at once
    assert seen == [(b"0", True), (b"1", True), (b"2", True)]


def test_a_transfer_that_fails_notifies_nobody(stack: ExitStack) -> None:
    pair = Slow(stack, rails=RailConfig(attempts=1))
    seen: list[bytes] = []
    pair.far.serve("moved", lambda payload, caller: seen.append(payload))
    pair.device.fail(next=1)
    with pytest.raises(Exception, match="fake"):
        pair.near.write(pair.local, pair.remote, [[0, 0, 64]], notify=("moved", b"no")).wait(DEADLINE_S)
    pair.near.write(pair.local, pair.remote, [[0, 0, 64]], notify=("moved", b"yes")).wait(DEADLINE_S)
    wait_until(lambda: bool(seen), "the second one arrives")
    assert seen == [b"yes"]


def test_a_higher_class_overtakes_what_waits(stack: ExitStack) -> None:
    pair = Slow(stack, 2 * MIB, rails=RailConfig(aging_s=60))
    pair.device.record()
    pair.device.freeze()
    classes: list[Priority] = ["low", "normal", "high"]
    transfers = []
    for index, priority in enumerate(classes):
        rows = np.add(pair.rows(64), [index * 512 * KIB, index * 512 * KIB, 0])
        transfers.append(pair.near.write(pair.local, pair.remote, rows, priority=priority))
    pair.device.thaw()
    for transfer in transfers:
        transfer.wait(DEADLINE_S)
    served = [operation.local_offset // (512 * KIB) for operation in pair.device.served()]
    in_flight = 2  # the low ones that the device had before the others came
    assert served[in_flight:] == sorted(served[in_flight:], reverse=True)


def test_a_low_class_does_not_wait_for_ever(stack: ExitStack) -> None:
    pair = Slow(stack, rails=RailConfig(aging_s=0.01))
    pair.device.slow(latency_s=0.001)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            pair.near.write(pair.local, pair.remote, pair.rows(32), priority="high").wait(DEADLINE_S)

    busy = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        pair.near.write(pair.local, pair.remote, pair.rows(32), priority="low").wait(DEADLINE_S)
    finally:
        stop.set()
        for thread in busy:
            thread.join(DEADLINE_S)


def test_transfers_of_one_class_share_a_peer_fairly(stack: ExitStack) -> None:
    pair = Slow(stack, 4 * MIB)
    pair.device.freeze()
    large = pair.near.write(pair.local, pair.remote, pair.rows(500))
    small = pair.near.write(pair.local, pair.remote, pair.rows(20, 2 * KIB))
    pair.device.record()
    pair.device.thaw()
    for transfer in (small, large):
        transfer.wait(DEADLINE_S)
    served = [operation.length for operation in pair.device.served()]
    before_the_last_small_one = served[: len(served) - served[::-1].index(2 * KIB)]
    assert before_the_last_small_one.count(4 * KIB) < 250


def test_the_window_of_a_driver_is_respected(stack: ExitStack) -> None:
    pair = Slow(stack, 4 * MIB)
    pair.near.write(pair.local, pair.remote, pair.rows(300)).wait(DEADLINE_S)
    assert pair.device.counters().in_flight_max <= 2


def test_a_stream_needs_a_driver_that_follows_streams(pair: Pair) -> None:
    with pytest.raises(NoRoute, match="stream"):
        pair.near.write(pair.local, pair.remote, [[0, 0, 64]], stream=1234).wait(DEADLINE_S)
    with pytest.raises(ConfigError, match="stream is str"):
        pair.near.write(pair.local, pair.remote, [[0, 0, 64]], stream="fast")


def test_a_stream_reaches_the_driver(stack: ExitStack) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0x5EED

    pair = Slow(stack)
    pair.device.record()
    pair.near.write(pair.local, pair.remote, [[0, 0, 64]], stream=Stream()).wait(DEADLINE_S)
    assert [operation.stream for operation in pair.device.served()] == [0x5EED]


@pytest.mark.parametrize("priority", ["urgent", ""])
def test_an_unknown_priority_is_refused(pair: Pair, priority: Any) -> None:
    with pytest.raises(ConfigError, match="'high', 'normal' or 'low'"):
        pair.near.write(pair.local, pair.remote, [[0, 0, 64]], priority=priority)
