"""KV events of a segment of the store: what comes to it and what leaves it."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import groupby

from mooncake_store.client import Store
from mooncake_store.kv_events.publisher import KVEventPublisher
from mooncake_store.kv_events.wire import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from mooncake_store.notices import SegmentChange

__all__ = ["SegmentEvents"]


class SegmentEvents:
    """Publishes what a store lends room for: stored, removed, cleared. Open it before anything is stored.

    A block's hash is the object's key. The store does not know the tokens of a key, so ``token_ids`` is empty
    and ``block_size`` 0; ``extra_keys`` has the tenant and the bytes of each key, which also keeps readers
    that go by tokens from taking it for a prefix. A key is removed when its last version has left. Events
    follow the store within its ``heartbeat_s``.
    """

    def __init__(self, store: Store, publisher: KVEventPublisher, *, medium: str = MEDIUM_CPU) -> None:
        """Publish from now on, AllBlocksCleared first, until either is closed; close the store first."""
        self._publisher, self._medium = publisher, medium
        self._lock = threading.Lock()  # handlers of one store run on one thread; but for this first event
        self._keys: dict[int, tuple[str, bytes]] = {}
        self._versions: Counter[tuple[str, bytes]] = Counter()
        self._clear()
        store.on_segment_change(self._take)
        store.on_cleared(self._clear)

    def _take(self, changes: list[SegmentChange]) -> None:
        with self._lock:
            events: list[Event] = []
            for stored, group in groupby(changes, key=lambda change: change.stored):
                run = list(group)
                event = self._stored(run) if stored else self._removed(run)
                if event is not None:
                    events.append(event)
            if events:
                self._publisher.publish(events)

    def _clear(self) -> None:
        with self._lock:
            self._keys.clear()
            self._versions.clear()
            self._publisher.publish([AllBlocksCleared()])

    def _stored(self, changes: list[SegmentChange]) -> BlockStored:
        for change in changes:
            self._keys[change.version] = (change.tenant, change.key)
            self._versions[change.tenant, change.key] += 1
        return BlockStored(
            block_hashes=[change.key for change in changes],
            token_ids=[],
            block_size=0,
            medium=self._medium,
            extra_keys=[[change.tenant, change.nbytes] for change in changes],
        )

    def _removed(self, changes: list[SegmentChange]) -> BlockRemoved | None:
        gone = []
        for change in changes:
            name = self._keys.pop(change.version, None)
            if name is None:
                continue  # it came before this began
            self._versions[name] -= 1
            if not self._versions[name]:
                del self._versions[name]
                gone.append(name[1])
        return BlockRemoved(block_hashes=list(gone), medium=self._medium) if gone else None
