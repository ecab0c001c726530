"""What a worker tells about its blocks ends true, in whichever order the store's news arrive."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_store import keys
from mooncake_store.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from mooncake_transformers.metrics import WorkerMetrics
from mooncake_transformers.prefix_store import PrefixStore

BLOCK_TOKENS = 4
ROOT = keys.root_digest("model", BLOCK_TOKENS, layout="test")
TOKENS = list(range(3 * BLOCK_TOKENS))


class StoreInTrouble:
    """A store that commits everything and then, before the put returns, does what the test says."""

    segment = object()

    def __init__(self) -> None:
        self.evicted: Callable[[list[bytes]], None]
        self.cleared: Callable[[], None]
        self.before_return: Callable[[], None] = lambda: None

    def on_evicted(self, handler: Callable[[list[bytes]], None]) -> None:
        self.evicted = handler

    def on_cleared(self, handler: Callable[[], None]) -> None:
        self.cleared = handler

    def batch_put_from(self, digests: Sequence[bytes], *_: object, **__: object) -> list[bool]:
        self.before_return()
        return [True] * len(digests)


def blocks_after(events: Sequence[object]) -> set[bytes]:
    """What a listener believes to be there."""
    there: set[bytes] = set()
    for event in events:
        if isinstance(event, BlockStored):
            there |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            there -= set(event.block_hashes)
        else:
            assert isinstance(event, AllBlocksCleared)
            there.clear()
    return there


@pytest.fixture
def told() -> list[object]:
    return []


@pytest.fixture
def store() -> StoreInTrouble:
    return StoreInTrouble()


@pytest.fixture
def prefix_store(store: StoreInTrouble, told: list[object]) -> Any:
    layout = SimpleNamespace(block_tokens=BLOCK_TOKENS, block_bytes=64)
    pool = SimpleNamespace(layout=layout, offset=lambda block: block * 64)
    publisher = SimpleNamespace(publish=told.extend)
    return PrefixStore(store, pool, object(), ROOT, publisher, WorkerMetrics())  # type: ignore[arg-type]


def test_blocks_are_announced_after_they_are_stored(prefix_store: Any, told: list[object]) -> None:
    digests = prefix_store.digests(TOKENS)
    assert prefix_store.publish(TOKENS, digests, [0, 1, 2], 0) == 3
    assert blocks_after(told) == set(digests)


def test_a_block_evicted_before_its_announcement_is_not_left_announced(
    prefix_store: Any, store: StoreInTrouble, told: list[object]
) -> None:
    digests = prefix_store.digests(TOKENS)
    store.before_return = lambda: store.evicted([digests[1]])
    prefix_store.publish(TOKENS, digests, [0, 1, 2], 0)
    assert blocks_after(told) == {digests[0], digests[2]}


def test_blocks_of_a_segment_that_was_cleared_meanwhile_are_not_announced(
    prefix_store: Any, store: StoreInTrouble, told: list[object]
) -> None:
    digests = prefix_store.digests(TOKENS)
    store.before_return = lambda: store.cleared()
    prefix_store.publish(TOKENS, digests, [0, 1, 2], 0)
    assert blocks_after(told) == set()


def test_an_eviction_of_the_past_does_not_hide_a_later_block(
    prefix_store: Any, store: StoreInTrouble, told: list[object]
) -> None:
    digests = prefix_store.digests(TOKENS)
    store.evicted(digests)
    prefix_store.publish(TOKENS, digests, [0, 1, 2], 0)
    assert blocks_after(told) == set(digests)
