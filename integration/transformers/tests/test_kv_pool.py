from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
import torch

from mooncake_transformers._errors import ConfigError, KVPoolExhausted
from mooncake_transformers.blocks import BlockWaiters, release_when_done
from mooncake_transformers.kv_layout import KVLayout, LayerShape
from mooncake_transformers.kv_pool import KVPool

# Keys and values differ, one layer has no cache, and a block is no multiple of the alignment.
LAYOUT = KVLayout((LayerShape(2, 4, 2, 3), None, LayerShape(1, 5, 1, 5)), torch.float32, 3)


def pool_of(blocks: int) -> KVPool:
    return KVPool(LAYOUT, memoryview(bytearray(LAYOUT.block_bytes * blocks)))


def test_a_block_holds_every_layer_once_and_starts_on_a_cache_line() -> None:
    assert LAYOUT.token_bytes == (8 + 6 + 5 + 5) * 4
    assert LAYOUT.block_bytes == 320
    assert LAYOUT.description == "lkvthd1/float32/b3/1*k2x4v2x3,1*-,1*k1x5v1x5"


def test_views_of_different_layers_and_blocks_never_overlap() -> None:
    pool = pool_of(4)
    views = [view for layer in pool.views if layer is not None for view in (layer.keys, layer.values)]
    for number, view in enumerate(views):
        for block in range(4):
            view[block] = 10 * number + block
    for number, view in enumerate(views):
        for block in range(4):
            assert (view[block] == 10 * number + block).all()


def test_views_write_through_to_the_memory_block_by_block() -> None:
    memory = bytearray(LAYOUT.block_bytes * 3)
    pool = KVPool(LAYOUT, memoryview(memory))
    first = pool.views[0]
    assert first is not None
    first.keys[2] = 1.0
    assert bytes(memory[: pool.offset(2)]) == bytes(2 * LAYOUT.block_bytes)
    assert memory[pool.offset(2) : pool.offset(2) + 4] == b"\x00\x00\x80\x3f"


def test_a_pool_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise kv_pool_bytes"):
        KVPool(LAYOUT, memoryview(bytearray(LAYOUT.block_bytes - 1)))


def test_a_block_is_free_again_after_its_last_user() -> None:
    pool = pool_of(2)
    blocks = pool.try_allocate(2)
    assert blocks == [0, 1]
    assert pool.try_allocate(1) is None
    pool.retain([0])
    pool.release([0, 1])
    assert pool.free_count == 1
    pool.release([0])
    assert pool.try_allocate(2) == [0, 1]


def test_releasing_a_free_block_is_an_error_of_the_program() -> None:
    pool = pool_of(2)
    pool.release(pool.try_allocate(1) or [])
    with pytest.raises(AssertionError, match="free already"):
        pool.release([0])


def test_blocks_are_released_when_their_user_in_another_thread_is_done() -> None:
    pool = pool_of(1)
    user: Future[None] = Future()
    release_when_done(pool, pool.try_allocate(1) or [], user)
    assert pool.free_count == 0
    user.set_exception(RuntimeError("done, badly"))
    assert pool.free_count == 1


def test_who_waits_gets_blocks_in_order_and_a_large_request_is_not_overtaken() -> None:
    async def scenario() -> list[str]:
        pool = pool_of(4)
        waiters = BlockWaiters(pool, wait_s=5, max_waiting=10)
        held = await waiters.take(4)
        order: list[str] = []

        async def take(name: str, count: int) -> None:
            blocks = await waiters.take(count)
            order.append(name)
            pool.release(blocks)

        tasks = [asyncio.create_task(take("large", 4)), asyncio.create_task(take("small", 1))]
        await asyncio.sleep(0)
        assert waiters.waiting == 2
        pool.release(held[:1])
        await asyncio.sleep(0)
        assert order == []
        pool.release(held[1:])
        await asyncio.gather(*tasks)
        waiters.close()
        return order

    assert asyncio.run(scenario()) == ["large", "small"]


def test_blocks_that_do_not_become_free_in_time_are_an_error_that_says_how_many_there_are() -> None:
    async def scenario() -> None:
        pool = pool_of(2)
        waiters = BlockWaiters(pool, wait_s=0.01, max_waiting=10)
        await waiters.take(1)
        with pytest.raises(KVPoolExhausted, match=r"2 KV blocks .* \(1 of 2 are free\)"):
            await waiters.take(2)
        assert len(await waiters.take(1)) == 1

    asyncio.run(scenario())


def test_who_gives_up_waiting_leaves_the_blocks_to_the_next() -> None:
    async def scenario() -> None:
        pool = pool_of(1)
        waiters = BlockWaiters(pool, wait_s=5, max_waiting=1)
        held = await waiters.take(1)
        first = asyncio.create_task(waiters.take(1))
        await asyncio.sleep(0)
        with pytest.raises(KVPoolExhausted, match="1 requests wait"):
            await waiters.take(1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(waiters.take(1))
        await asyncio.sleep(0)
        pool.release(held)
        assert await second == [0]

    asyncio.run(scenario())
