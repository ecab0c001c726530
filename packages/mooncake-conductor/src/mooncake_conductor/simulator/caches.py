"""The prefix caches of all instances: who has which block, and in which order blocks leave.

Least recently used first; a prompt's blocks are touched from the tail, so that a prefix is never older than
what continues it and the cache stays closed under prefixes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mooncake_conductor.simulator.compiling import compiled

__all__ = ["MOST_INSTANCES", "Caches", "make_caches", "match", "store"]

MOST_INSTANCES = 64  # one bit each
I32: TypeAlias = NDArray[np.int32]


class Caches(NamedTuple):
    """Arrays that :func:`match` and :func:`store` work on.

    Attributes:
        holders: uint64 [blocks]: a bit for each instance that has the block.
        newer, older: int32 [instances, blocks + 1]: neighbours in the order of use; the last element is the
            list's end: its ``newer`` is the oldest block, its ``older`` the newest.
        used: int64 [instances]: blocks that each has.
        capacity: blocks that each may have.
    """

    holders: NDArray[np.uint64]
    newer: I32
    older: I32
    used: NDArray[np.int64]
    capacity: int


def make_caches(instances: int, blocks: int, capacity: int) -> Caches:
    """Empty caches of so many blocks each."""
    if not 1 <= instances <= MOST_INSTANCES:
        raise ValueError(f"{instances} instances; 1 to {MOST_INSTANCES} can be simulated")
    ends = np.full((instances, blocks + 1), blocks, np.int32)
    holders = np.zeros(blocks, np.uint64)
    return Caches(holders, ends, ends.copy(), np.zeros(instances, np.int64), max(1, capacity))


@compiled
def match(caches: Caches, blocks: NDArray[np.int64], matched: NDArray[np.int64]) -> None:
    """Write how many leading blocks each instance has."""
    instances = len(matched)
    still = np.uint64(0)
    for i in range(instances):
        still |= np.uint64(1) << np.uint64(i)
    matched[:] = 0
    for depth in range(len(blocks)):
        here = still & caches.holders[blocks[depth]]
        gone = still & ~here
        if gone != 0:
            for i in range(instances):
                if gone >> np.uint64(i) & np.uint64(1):
                    matched[i] = depth
        still = here
        if still == 0:
            return
    for i in range(instances):
        if still >> np.uint64(i) & np.uint64(1):
            matched[i] = len(blocks)


@compiled
def _unlink(caches: Caches, instance: int, block: int) -> None:
    newer, older = caches.newer[instance, block], caches.older[instance, block]
    caches.older[instance, newer] = older
    caches.newer[instance, older] = newer


@compiled
def _link_newest(caches: Caches, instance: int, block: int) -> None:
    end = caches.newer.shape[1] - 1
    newest = caches.older[instance, end]
    caches.older[instance, block] = newest
    caches.newer[instance, block] = end
    caches.newer[instance, newest] = block
    caches.older[instance, end] = block


@compiled
def store(caches: Caches, instance: int, blocks: NDArray[np.int64]) -> int:
    """An instance has these blocks now, and touched them last; how many others left."""
    end = caches.newer.shape[1] - 1
    bit = np.uint64(1) << np.uint64(instance)
    left = 0
    for at in range(len(blocks) - 1, -1, -1):
        block = blocks[at]
        if caches.holders[block] & bit:
            _unlink(caches, instance, block)
        else:
            caches.holders[block] |= bit
            caches.used[instance] += 1
        _link_newest(caches, instance, block)
    while caches.used[instance] > caches.capacity:
        oldest = caches.newer[instance, end]
        _unlink(caches, instance, oldest)
        caches.holders[oldest] &= ~bit
        caches.used[instance] -= 1
        left += 1
    return left
