"""Registries: where engines announce their names and published regions, and look up those of others."""

from mooncake_transfer.registry.contract import Registry
from mooncake_transfer.registry.finding import open_registry, registries

__all__ = ["Registry", "open_registry", "registries"]
