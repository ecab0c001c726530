"""Finds the eviction policies that are installed; a broken plugin never stops the others."""

from __future__ import annotations

import functools

from mooncake_store._errors import ConfigError
from mooncake_store.eviction.contract import EvictionInfo
from mooncake_transfer.plugins import load_plugins

__all__ = ["find_eviction"]

EVICTION_GROUP = "mooncake_store.eviction"


def find_eviction(name: str) -> EvictionInfo:
    """The policy of that name. Raises ConfigError with the names there are."""
    found = _installed()
    if name not in found:
        raise ConfigError(f"there is no eviction policy {name!r}; installed are {', '.join(sorted(found))}")
    return found[name]


@functools.cache
def _installed() -> dict[str, EvictionInfo]:
    plugins = load_plugins(EVICTION_GROUP)
    offered = plugins.offered(
        "eviction policy", "mooncake_store_eviction_policies", EvictionInfo, lambda info: info.name
    )
    return {info.name: info for _, info in offered}
