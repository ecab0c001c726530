"""The prefix index against a brute-force model, and the cases the model does not have."""

import itertools
from collections import Counter

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_conductor.index import ClusterIndex, PrefixIndex, prefix
from mooncake_store.errors import EventMalformed
from mooncake_store.keys import root_digest
from mooncake_store.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

SIZE = 2
Path = tuple[int, ...]  # the tokens of a whole prefix

# Few different blocks and long paths, so that steps often meet on one path.
blocks = st.sampled_from([(0, 0), (0, 1)])
paths = st.lists(blocks, min_size=1, max_size=4).map(lambda parts: tuple(itertools.chain(*parts)))
workers = st.sampled_from(["a", "b"])
media = st.sampled_from(["GPU", "CPU", None])
stores = st.tuples(st.just("store"), workers, paths, st.integers(0, 3), media)
removals = st.tuples(st.just("remove"), workers, paths, st.just(0), media)
clearings = st.tuples(st.just("clear"), workers, paths, st.just(0), st.none())
# Mostly stores: a clearing now and then, or nothing would ever build up.
operations = st.lists(st.one_of(stores, stores, stores, stores, removals, removals, clearings), max_size=30)


def new_index() -> PrefixIndex:
    return PrefixIndex(SIZE, root_digest("m", SIZE, layout="test"))


def prefixes(path: Path) -> list[Path]:
    return [path[:end] for end in range(SIZE, len(path) + 1, SIZE)]


def name_of(worker: str, path: Path) -> int | bytes:
    """Each worker has names of its own; those of one are bytes."""
    text = repr((worker, path)).encode()
    return text if worker == "b" else xxhash.xxh3_64_intdigest(text)


def stored(worker: str, path: Path, skip: int = 0, medium: str | None = None) -> BlockStored:
    """The event for the blocks of ``path`` from number ``skip`` on."""
    blocks = prefixes(path)
    return BlockStored(
        block_hashes=[name_of(worker, block) for block in blocks[skip:]],
        parent_block_hash=name_of(worker, blocks[skip - 1]) if skip else None,
        token_ids=list(path[skip * SIZE :]),
        block_size=SIZE,
        medium=medium,
    )


@settings(max_examples=300, deadline=None)
@given(operations, paths)
def test_every_match_equals_that_of_a_brute_force_model(steps, unseen: Path) -> None:
    index = new_index()
    held = {worker: Counter() for worker in "ab"}
    for kind, worker, path, skip, medium in steps:
        if kind == "store":
            skip = min(skip, len(prefixes(path)) - 1)
            assert index.stored(worker, stored(worker, path, skip, medium))
            held[worker].update((block, medium or "GPU") for block in prefixes(path)[skip:])
        elif kind == "remove":
            index.removed(worker, BlockRemoved(block_hashes=[name_of(worker, path)], medium=medium))
            held[worker] -= Counter([(path, medium or "GPU")])
        else:
            index.clear(worker)
            held[worker].clear()
    for wanted in {unseen, *(path for _, _, path, _, _ in steps)}:
        assert index.match_tokens(wanted) == brute_force_match(held, wanted)


def brute_force_match(held: dict[str, Counter], wanted: Path) -> dict[str, int]:
    matched = {}
    for worker, copies in held.items():
        present = {block for block, _ in copies}
        leading = list(itertools.takewhile(present.__contains__, prefixes(wanted)))
        if leading:
            matched[worker] = len(leading[-1])
    return matched


def test_a_last_partial_block_never_matches() -> None:
    index = new_index()
    index.stored("a", stored("a", (1, 2, 3, 4)))
    assert index.match_tokens([1, 2, 3, 4, 5]) == {"a": 4}
    assert index.match_tokens([1, 2, 3]) == {"a": 2}
    assert index.match_tokens([1]) == {}


def test_a_block_stored_twice_stays_until_it_is_removed_twice() -> None:
    index = new_index()
    remove = BlockRemoved(block_hashes=[name_of("a", (1, 2))])
    index.stored("a", stored("a", (1, 2)))
    index.stored("a", stored("a", (1, 2)))
    index.removed("a", remove)
    assert index.match_tokens([1, 2]) == {"a": 2}
    index.removed("a", remove)
    assert index.match_tokens([1, 2]) == {}
    index.removed("a", remove)
    assert index.block_count("a") == 0


def test_a_hole_ends_the_match_until_it_is_filled() -> None:
    index = new_index()
    index.stored("a", stored("a", (1, 2, 3, 4, 5, 6)))
    index.removed("a", BlockRemoved(block_hashes=[name_of("a", (1, 2, 3, 4))]))
    assert index.match_tokens([1, 2, 3, 4, 5, 6]) == {"a": 2}
    index.stored("a", stored("a", (1, 2, 3, 4), skip=1))
    assert index.match_tokens([1, 2, 3, 4, 5, 6]) == {"a": 6}


def test_blocks_that_came_before_their_parent_count_when_it_comes() -> None:
    index = new_index()
    index.stored("a", stored("a", (1, 2, 3, 4, 5, 6), skip=2))
    index.stored("a", stored("a", (1, 2, 3, 4), skip=1))
    assert index.block_count("a") == 0
    index.stored("a", stored("a", (1, 2)))
    assert index.match_tokens([1, 2, 3, 4, 5, 6]) == {"a": 6}


def test_a_content_hash_as_parent_is_found_in_another_workers_part_of_the_store() -> None:
    index = new_index()
    parent, child = b"p" * 16, b"c" * 16
    whole = BlockStored(block_hashes=[parent], token_ids=[1, 2], block_size=SIZE)
    rest = BlockStored(block_hashes=[child], parent_block_hash=parent, token_ids=[3, 4], block_size=SIZE)
    index.stored("early", rest)
    index.stored("a", whole)
    index.stored("late", rest)
    assert index.block_count("early") == index.block_count("late") == 1
    assert index.match_tokens([1, 2, 3, 4]) == {"a": 2}
    index.stored("late", whole)
    assert index.match_tokens([1, 2, 3, 4]) == {"a": 2, "late": 4}


def test_a_name_used_for_other_content_means_the_other_content() -> None:
    index = new_index()
    index.stored("a", BlockStored(block_hashes=[1], token_ids=[1, 2], block_size=SIZE))
    index.stored("a", BlockStored(block_hashes=[1], token_ids=[3, 4], block_size=SIZE))
    assert index.match_tokens([1, 2]) == {}
    assert index.match_tokens([3, 4]) == {"a": 2}


def test_a_dropped_workers_place_is_given_to_the_next() -> None:
    index = new_index()
    for worker in "abc":
        index.stored(worker, stored(worker, (1, 2)))
    index.drop("b")
    index.stored("d", stored("d", (3, 4)))
    assert index.match_tokens([1, 2]) == {"a": 2, "c": 2}
    assert index.match_tokens([3, 4]) == {"d": 2}


def test_blocks_that_wait_for_a_parent_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(prefix, "WAITING_LIMIT", 2)
    index = new_index()
    for first in range(5):
        index.stored("a", stored("a", (first, 0, 1, 1), skip=1))
    for first in range(5):
        index.stored("a", stored("a", (first, 0)))
    found = [index.match_tokens([first, 0, 1, 1])["a"] for first in range(5)]
    assert found == [2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    "other",
    [{"lora_id": 1}, {"lora_name": "x"}, {"extra_keys": [["image"]]}, {"group_idx": 1}, {"block_size": 1}],
)
def test_blocks_that_are_no_plain_prefix_of_this_index_are_left_out(other) -> None:
    fields = {"block_hashes": [1], "token_ids": [1, 2], "block_size": SIZE, **other}
    index = new_index()
    assert index.stored("a", BlockStored(**fields)) is False
    assert index.match_tokens([1, 2]) == {}


def test_empty_extra_keys_are_no_extra_keys() -> None:
    event = BlockStored(block_hashes=[1], token_ids=[1, 2], block_size=SIZE, extra_keys=[None])
    assert new_index().stored("a", event) is True


def test_a_store_whose_tokens_do_not_fill_its_blocks_is_refused() -> None:
    with pytest.raises(EventMalformed, match="1 blocks of 2 has 3 tokens"):
        new_index().stored("a", BlockStored(block_hashes=[1], token_ids=[1, 2, 3], block_size=SIZE))


def test_workers_of_different_block_sizes_and_models_are_matched_apart() -> None:
    cluster = ClusterIndex()
    cluster.attach("two", "m", 2)
    cluster.attach("three", "m", 3)
    cluster.attach("other", "n", 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    for worker, size in (("two", 2), ("three", 3), ("other", 2)):
        full = tokens[: len(tokens) // size * size]
        names = list(range(len(full) // size))
        cluster.apply(
            worker, EventBatch(0.0, [BlockStored(block_hashes=names, token_ids=full, block_size=size)])
        )
    assert cluster.match("m", tokens[:5]) == {"two": 4, "three": 3}
    assert cluster.match("n", tokens) == {"other": 6}
    cluster.apply("two", EventBatch(1.0, [AllBlocksCleared()]))
    assert cluster.match("m", tokens) == {"three": 6}
    cluster.detach("three")
    assert cluster.match("m", tokens) == {}
    assert cluster.block_count("three") == 0
