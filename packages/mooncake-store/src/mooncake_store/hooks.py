"""Hooks a plugin of the store implements. A plugin module, all of it::

    from mooncake_store.eviction import EvictionInfo
    from mooncake_store.hooks import hookimpl

    class Random: ...                            # an EvictionPolicy

    @hookimpl
    def mooncake_store_eviction_policies():
        return [EvictionInfo("random", Random)]

It is named by an entry point in the group ``mooncake_store.eviction``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_store.eviction.contract import EvictionInfo
from mooncake_transfer.hooks import hookimpl, hookspec

__all__ = ["hookimpl", "mooncake_store_eviction_policies"]


@hookspec
def mooncake_store_eviction_policies() -> Sequence[EvictionInfo]:  # type: ignore[empty-body]
    """Offer eviction policies. Called once, when the first master starts."""
