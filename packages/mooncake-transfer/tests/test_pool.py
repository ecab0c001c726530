"""Pooled buffers: cut and joined again, bounded, in order, never handed out twice."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import (
    ConfigError,
    MemoryUnavailable,
    PoolExhausted,
    RegionBusy,
    RegionClosed,
)
from mooncake_transfer.pool import BufferPool
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import wait_until

KIB = 1 << 10
DEADLINE_S = 20.0


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as engine:
        yield engine


def small_pool(engine: TransferEngine, slabs: int = 1) -> BufferPool:
    return BufferPool(engine, slab_bytes=64 * KIB, max_bytes=slabs * 64 * KIB, name="small")


def wait_until_waiting(pool: BufferPool, callers: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while pool.usage().waiting < callers:
        assert time.monotonic() < deadline_s, f"{callers} callers do not come to wait"
        time.sleep(0.001)


def test_buffers_move_bytes_without_registering_again(engine: TransferEngine) -> None:
    with TransferEngine() as other, BufferPool(engine, slab_bytes=64 * KIB, max_bytes=128 * KIB) as pool:
        remote_region = other.allocate(64 * KIB)
        remote = engine.import_region(remote_region.descriptor())
        with pool.acquire(100) as first, pool.acquire(5000) as second:
            first.view()[:] = b"a" * 100
            second.view()[:] = b"b" * 5000
            assert first.region is second.region
            blocks = [[first.offset, 0, 100], [second.offset, 100, 5000]]
            engine.write(first.region, remote, blocks).wait(DEADLINE_S)
        assert bytes(remote_region.view()[:5100]) == b"a" * 100 + b"b" * 5000
        assert pool.usage().slabs == 1


def test_sizes_are_powers_of_two_and_neighbours_join_again(engine: TransferEngine) -> None:
    with small_pool(engine) as pool:
        buffers = [pool.acquire(size) for size in (1, 4096, 4097, 16 * KIB, 32 * KIB)]
        assert sorted(buffer.offset % 4096 for buffer in buffers) == [0] * 5
        assert buffers[2].offset % 8192 == 0
        usage = pool.usage()
        assert (usage.buffers, usage.held_bytes, usage.reserved_bytes) == (5, 64 * KIB, 64 * KIB)
        for buffer in buffers:
            buffer.release()
        assert pool.usage().held_bytes == 0
        pool.acquire(64 * KIB, timeout_s=0).release()
        assert pool.usage().peak_bytes == 64 * KIB


def test_no_byte_belongs_to_two_buffers_whatever_threads_do(engine: TransferEngine) -> None:
    with small_pool(engine, slabs=3) as pool:

        def use(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(300):
                with pool.acquire(chance.randint(1, 20 * KIB), DEADLINE_S) as buffer:
                    mark = bytes([seed]) * buffer.nbytes
                    buffer.view()[:] = mark
                    assert bytes(buffer.view()) == mark

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(use, range(1, 9)))
        assert pool.usage().held_bytes == 0
        whole = [pool.acquire(64 * KIB, timeout_s=0) for _ in range(pool.usage().slabs)]
        assert pool.usage().slabs <= 3
        for buffer in whole:
            buffer.release()


def test_a_full_pool_says_who_holds_it_when_the_deadline_passes(engine: TransferEngine) -> None:
    with small_pool(engine) as pool, pool.acquire(40 * KIB):
        with pytest.raises(PoolExhausted, match=r"no 1 bytes.*1 buffers hold 65536 of at most 65536"):
            pool.acquire(1, timeout_s=0.01)
        assert pool.usage().waiting == 0


def test_a_waiter_gets_what_is_released(engine: TransferEngine) -> None:
    with small_pool(engine) as pool, ThreadPoolExecutor(1) as thread:
        held = pool.acquire(64 * KIB)
        later = thread.submit(pool.acquire, 4 * KIB, DEADLINE_S)
        wait_until_waiting(pool, 1)
        held.release()
        later.result(DEADLINE_S).release()


def test_a_large_request_is_served_before_small_ones_that_came_later(engine: TransferEngine) -> None:
    with small_pool(engine) as pool, ThreadPoolExecutor(2) as threads:
        halves = [pool.acquire(32 * KIB), pool.acquire(32 * KIB)]
        order: list[str] = []

        def take(name: str, size: int) -> None:
            with pool.acquire(size, DEADLINE_S):
                order.append(name)

        large = threads.submit(take, "large", 64 * KIB)
        wait_until_waiting(pool, 1)
        small = threads.submit(take, "small", 4 * KIB)
        wait_until_waiting(pool, 2)
        halves[0].release()  # enough for the small one, which has to wait its turn
        halves[1].release()
        large.result(DEADLINE_S)
        small.result(DEADLINE_S)
        assert order == ["large", "small"]


def test_who_gives_up_lets_those_behind_pass(engine: TransferEngine) -> None:
    with small_pool(engine) as pool, ThreadPoolExecutor(2) as threads, pool.acquire(32 * KIB):
        large = threads.submit(pool.acquire, 64 * KIB, 3.0)
        wait_until_waiting(pool, 1)
        small = threads.submit(pool.acquire, 4 * KIB, DEADLINE_S)
        with pytest.raises(PoolExhausted):
            large.result(DEADLINE_S)
        small.result(DEADLINE_S).release()


def test_a_second_release_is_an_error_and_changes_nothing(engine: TransferEngine) -> None:
    with small_pool(engine) as pool:
        buffer = pool.acquire(4 * KIB)
        buffer.release()
        with pool.acquire(4 * KIB):
            with pytest.raises(RegionClosed, match="twice"):
                buffer.release()
            with pytest.raises(RegionClosed, match="released"):
                buffer.view()
            assert pool.usage().buffers == 1
        with pool.acquire(1) as early:
            early.release()


@pytest.mark.parametrize("nbytes", [0, -1, 64 * KIB + 1])
def test_a_size_that_no_slab_holds_is_refused_at_once(engine: TransferEngine, nbytes: int) -> None:
    with small_pool(engine) as pool, pytest.raises(ConfigError, match="1 to 65536 bytes"):
        pool.acquire(nbytes)


@pytest.mark.parametrize(("slab", "limit"), [(5000, 1 << 20), (2048, 1 << 20), (1 << 20, 1 << 19)])
def test_limits_that_cannot_work_are_refused(engine: TransferEngine, slab: int, limit: int) -> None:
    with pytest.raises(ConfigError, match="bytes is"):
        BufferPool(engine, slab_bytes=slab, max_bytes=limit)


def test_a_slab_that_cannot_be_had_is_the_callers_error_and_no_leak(engine: TransferEngine) -> None:
    answers: list[Region | None] = [None, engine.allocate(64 * KIB)]

    def allocate(nbytes: int, name: str) -> Region:
        region = answers.pop(0)
        if region is None:
            raise MemoryUnavailable("no such luck")
        return region

    with BufferPool(engine, slab_bytes=64 * KIB, max_bytes=64 * KIB, allocate=allocate) as pool:
        with pytest.raises(MemoryUnavailable, match="luck"):
            pool.acquire(1)
        assert pool.usage().waiting == 0
        pool.acquire(1).release()


def test_idle_slabs_are_given_back_on_request(engine: TransferEngine) -> None:
    with small_pool(engine, slabs=2) as pool:
        first, second = pool.acquire(64 * KIB), pool.acquire(64 * KIB)
        first.release()
        assert pool.trim() == 64 * KIB
        assert pool.usage().reserved_bytes == 64 * KIB
        pool.acquire(64 * KIB).release()
        second.release()
        assert pool.trim() == 128 * KIB


def test_closing_waits_for_buffers_and_sends_waiters_away(engine: TransferEngine) -> None:
    pool = small_pool(engine)
    buffer = pool.acquire(64 * KIB)
    with ThreadPoolExecutor(1) as thread:
        waiter = thread.submit(pool.acquire, 1, DEADLINE_S)
        wait_until_waiting(pool, 1)
        with pytest.raises(RegionBusy, match=r"1 buffers \(65536 bytes\)"):
            pool.close(timeout_s=0.01)
        with pytest.raises(RegionClosed, match="closed"):
            waiter.result(DEADLINE_S)
    threading.Timer(0.05, buffer.release).start()
    pool.close(DEADLINE_S)
    pool.close()
    with pytest.raises(RegionClosed):
        pool.acquire(1)


def test_closing_waits_for_peers_no_longer_than_it_said() -> None:
    with ExitStack() as stack:
        fabric = stack.enter_context(FakeFabric())
        near = stack.enter_context(TransferEngine(fabric.config("near")))
        # Without a limit of its own, closing a region would wait so long.
        far = stack.enter_context(TransferEngine(fabric.config("far", close_timeout_s=DEADLINE_S)))
        device = fabric.device("far")
        stack.callback(device.release)
        pool = small_pool(far)
        with pool.acquire(64 * KIB) as buffer:
            remote = near.import_region(buffer.region.descriptor())
            device.hold()
            transfer = near.read(near.allocate(KIB), remote, [[0, 0, KIB]])
            wait_until(lambda: device.held() == 1, "the owner's device holds the read")
        began_s = time.monotonic()
        with pytest.raises(RegionBusy, match="peers still use it"):
            pool.close(timeout_s=0.1)
        assert time.monotonic() - began_s < DEADLINE_S / 2
        device.release()
        transfer.wait(DEADLINE_S)
        pool.close(DEADLINE_S)


def test_an_idle_pool_closes_without_waiting(engine: TransferEngine) -> None:
    pool = small_pool(engine)
    with pool.acquire(KIB) as buffer, TransferEngine() as peer:
        remote = peer.import_region(buffer.region.descriptor())
        peer.read(peer.allocate(KIB), remote, [[0, 0, KIB]]).wait(DEADLINE_S)
    pool.close(timeout_s=0)
    with pytest.raises(RegionClosed):
        buffer.region.descriptor()
