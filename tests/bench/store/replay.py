"""Hit rates of eviction policies when public request traces are replayed against a cache of so many blocks.

A request asks for its blocks. Those from the first one up to the first that is missing are hits: a prefix
can only be used as a whole. It then uses every block that is there and stores the others, tail first, as the
store does.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from mooncake_store.eviction import EvictionPolicy

__all__ = ["RULES", "Requests", "read_trace", "replay_belady", "replay_policy", "replay_rule"]

Requests = list[list[int]]

WATERMARK, BATCH = 0.9, 0.05


def read_trace(file: Path) -> Requests:
    """Block ids of every request, in order of the file. An id stands for the whole prefix up to its block."""
    with file.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines if line.strip()]


def replay_policy(requests: Requests, capacity: int, policy: EvictionPolicy) -> float:
    """Per cent of all blocks that are hits; ``policy`` is new and empty."""
    id_of: dict[int, int] = {}
    key_of: dict[int, int] = {}
    fresh, hits = itertools.count(1), 0
    for blocks in requests:
        hits += _prefix(blocks, id_of)
        tail_first = list(dict.fromkeys(reversed(blocks)))
        there = _numbers(id_of[block] for block in tail_first if block in id_of)
        missing = [block for block in tail_first if block not in id_of]
        # What a request uses is pinned meanwhile: it does not make room for the rest of the same request.
        policy.pin(there)
        policy.touch(there)
        for _ in range(len(id_of) + len(missing) - capacity):
            victim = policy.victim()
            assert victim is not None, "the cache holds no more blocks than one request has"
            policy.remove(_numbers([victim]))
            del id_of[key_of.pop(victim)]
        ids = list(itertools.islice(fresh, len(missing)))
        id_of.update(zip(missing, ids, strict=True))
        key_of.update(zip(ids, missing, strict=True))
        policy.insert(_numbers(ids), _numbers(missing), np.ones(len(ids), np.uint64))
        policy.unpin(there)
    return _per_cent(hits, requests)


def replay_rule(requests: Requests, capacity: int, room: Callable[[int, int], int]) -> float:
    """The same with exact LRU by an ordered dict, where ``room(used, capacity)`` says how many have to go
    before the next one comes.
    """
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in requests:
        hits += _prefix(blocks, order)
        tail_first = list(dict.fromkeys(reversed(blocks)))
        for block in tail_first:
            if block in order:
                order.move_to_end(block)
        for block in tail_first:
            if block not in order:
                for _ in range(room(len(order), capacity)):
                    order.popitem(last=False)
                order[block] = None
    return _per_cent(hits, requests)


def _one_at_a_time(used: int, capacity: int) -> int:
    return max(0, used + 1 - capacity)


def _watermark(used: int, capacity: int) -> int:
    return max(1, round(BATCH * capacity)) if used + 1 > WATERMARK * capacity else 0


RULES = {"exact LRU": _one_at_a_time, "90 % watermark, evict 5 %": _watermark}


def replay_belady(requests: Requests, capacity: int) -> float:
    """The bound: whoever knows the future keeps what is used again soonest, and does not even store what is
    not. Hits are counted block by block, which no rule with prefixes can exceed.
    """
    stream = [block for blocks in requests for block in dict.fromkeys(reversed(blocks))]
    never = len(stream)
    next_use, last = [never] * len(stream), {}
    for at in range(len(stream) - 1, -1, -1):
        next_use[at] = last.get(stream[at], never)
        last[stream[at]] = at
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for at, block in enumerate(stream):
        hits += kept.get(block) == at
        kept[block] = next_use[at]
        heappush(farthest, (-next_use[at], block))
        while len(kept) > capacity:
            use, victim = heappop(farthest)
            if kept.get(victim) == -use:
                del kept[victim]
        if len(farthest) > 4 * capacity:
            farthest = [(-use, block) for block, use in kept.items()]
            heapify(farthest)
    return _per_cent(hits, requests)


def _prefix(blocks: list[int], there: Container[int]) -> int:
    return sum(1 for _ in itertools.takewhile(there.__contains__, blocks))


def _per_cent(hits: int, requests: Requests) -> float:
    return 100.0 * hits / sum(map(len, requests))


def _numbers(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.uint64)
