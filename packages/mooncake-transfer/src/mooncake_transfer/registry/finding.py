"""Opens a registry by its URL; the schemes come from plugins, the built-in ones among them."""

from __future__ import annotations

import functools

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.hooks import RegistryInfo
from mooncake_transfer.plugins import REGISTRY_GROUP, Plugins, load_plugins
from mooncake_transfer.registry import builtin
from mooncake_transfer.registry.cluster import ClusterRegistry, split_cluster
from mooncake_transfer.registry.contract import Registry
from mooncake_transfer.registry.deadline import TimedRegistry

__all__ = ["open_registry", "registries"]


@functools.cache
def registry_plugins() -> Plugins:
    """The registry plugins of this process, loaded when the first registry is opened."""
    plugins = load_plugins(REGISTRY_GROUP)
    plugins.manager.register(builtin, name=f" {builtin.__name__}")  # sorts first: nobody takes its schemes
    return plugins


def registries() -> dict[str, RegistryInfo]:
    """Every scheme that can be used, by name."""
    return {info.scheme: info for info in registry_plugins().registries()}


def open_registry(url: str, timeout_s: float) -> TimedRegistry:
    """Open the registry at ``url`` without connecting to it yet.

    ``timeout_s`` limits each call. Every scheme takes ``?cluster=NAME``, which keeps to keys of that cluster.
    Raises ConfigError for an unknown scheme, a malformed URL, and when a library is missing.
    """
    scheme, colon, _ = url.partition(":")
    known = registries()
    if not colon or scheme not in known:
        raise ConfigError(
            f"registry {scheme + ':...' if colon else url!r} has no known scheme; "
            f"known are {', '.join(sorted(known))}"
        )
    plain_url, cluster = split_cluster(url)

    def open_client() -> Registry:
        client = known[scheme].open(plain_url, timeout_s)
        return ClusterRegistry(client, cluster) if cluster else client

    return TimedRegistry(open_client, timeout_s)
