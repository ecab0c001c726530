"""The registries that come with this package, described without importing their libraries."""

from __future__ import annotations

from mooncake_transfer.hooks import RegistryInfo, hookimpl
from mooncake_transfer.registry.memory import open_memory

__all__ = ["mooncake_registries"]


@hookimpl
def mooncake_registries() -> list[RegistryInfo]:
    """The in-process one."""
    return [RegistryInfo("memory", open_memory)]
