"""``memory:NAME``: a registry for the engines of one process, in tests and single-process programs."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from mooncake_transfer.registry.table import ExpiringTable

__all__ = ["MemoryRegistry", "open_memory"]

_tables: dict[str, ExpiringTable] = {}
_lock = threading.Lock()


class MemoryRegistry:
    """The registry of that name in this process; it lasts as long as the process."""

    def __init__(self, name: str) -> None:
        self.where = f"memory:{name}"
        with _lock:
            self._table = _tables.setdefault(name, ExpiringTable())

    def get(self, key: str) -> bytes | None:
        """As ``Registry.get``."""
        return self._table.get(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        """As ``Registry.list``."""
        return self._table.list(prefix)

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """As ``Registry.replace``."""
        return self._table.replace(key, lambda value: value == old, new, ttl_s)

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        """As ``Registry.renew``."""
        return self._table.renew({key: value.__eq__ for key, value in entries.items()}, ttl_s)

    def remove(self, entries: Mapping[str, bytes]) -> None:
        """As ``Registry.remove``."""
        self._table.remove({key: value.__eq__ for key, value in entries.items()})

    def close(self) -> None:
        """Nothing: the entries belong to the process."""


def open_memory(url: str, timeout_s: float) -> MemoryRegistry:
    """Open ``memory:NAME``; there is nothing to wait for, so ``timeout_s`` has no effect."""
    return MemoryRegistry(url.partition(":")[2])
