"""The plugin that offers this package's own policies, the same way a third party's would.

clock: a queue whose head gets another round for every recent use it has had, up to three. On public
conversation traces it hits more often than exact LRU, and a hit moves nothing. lru: what has not been used
for longest. arc: LRU that learns how much room what was used once deserves. gdsf: the fewest uses for the
size, with aging; it keeps many small objects rather than few large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mooncake_store._core import EvictionQueue
from mooncake_store.eviction.contract import EvictionInfo
from mooncake_store.hooks import hookimpl

__all__ = ["mooncake_store_eviction_policies"]


@hookimpl
def mooncake_store_eviction_policies() -> Sequence[EvictionInfo]:
    """The policies of this package."""
    return [
        EvictionInfo(name, partial(EvictionQueue, name), name) for name in ("clock", "lru", "arc", "gdsf")
    ]
