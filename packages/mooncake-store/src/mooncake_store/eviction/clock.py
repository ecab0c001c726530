"""CLOCK with two bits: a queue whose head gets another round for every recent use it has had, up to three.

On public conversation traces it hits as often as exact LRU or more often, and a hit moves nothing. Callers
insert and touch the blocks of a prefix tail first: a block is then never younger than the blocks it builds
on, so a prefix leaves the store from its tail and what is left of it stays usable.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Clock"]

MAX_USES = 3


class Clock:
    """Order of eviction of object ids. Not thread-safe.

    A pinned id is never the victim. It waits outside the queue once the hand has met it, so that pinned ids
    cost the hand nothing, and comes back at the young end: it has just been used.
    """

    def __init__(self) -> None:
        self._uses: OrderedDict[int, int] = OrderedDict()
        self._parked: dict[int, int] = {}
        self._pins: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._uses) + len(self._parked)

    def __contains__(self, item: int) -> bool:
        return item in self._uses or item in self._parked

    def insert(self, item: int) -> None:
        """Add a new id at the young end, with no use yet."""
        assert item not in self, f"id {item} is in the queue already"
        self._uses[item] = 0

    def touch(self, item: int) -> None:
        """Count one use."""
        where = self._uses if item in self._uses else self._parked
        where[item] = min(where[item] + 1, MAX_USES)

    def pin(self, item: int) -> None:
        """Keep the id from being the victim until :meth:`unpin` has been called as often."""
        assert item in self, f"id {item} is not in the queue"
        self._pins[item] = self._pins.get(item, 0) + 1

    def unpin(self, item: int) -> None:
        """Take one pin away."""
        pins = self._pins.pop(item) - 1
        if pins:
            self._pins[item] = pins
        elif item in self._parked:
            self._uses[item] = self._parked.pop(item)

    def remove(self, item: int) -> None:
        """Forget an id, pinned or not."""
        self._pins.pop(item, None)
        if self._parked.pop(item, None) is None:
            del self._uses[item]

    def victim(self) -> int | None:
        """The id to evict next, which stays until it is removed; None when every id is pinned."""
        while self._uses:
            item, uses = next(iter(self._uses.items()))
            if item in self._pins:
                self._parked[item] = self._uses.pop(item)
            elif uses:
                self._uses[item] = uses - 1
                self._uses.move_to_end(item)
            else:
                return item
        return None
