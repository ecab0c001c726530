"""The registries that come with this package, described without importing their libraries."""

from __future__ import annotations

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.hooks import RegistryInfo, hookimpl
from mooncake_transfer.registry.contract import Registry
from mooncake_transfer.registry.memory import open_memory

__all__ = ["mooncake_registries"]


@hookimpl
def mooncake_registries() -> list[RegistryInfo]:
    """The in-process one, our HTTP server, etcd and Redis."""
    return [
        RegistryInfo("memory", open_memory),
        RegistryInfo("http", _open_http),
        RegistryInfo("https", _open_http),
        RegistryInfo("etcd", _open_etcd),
        RegistryInfo("etcds", _open_etcd),
        RegistryInfo("redis", _open_redis),
        RegistryInfo("rediss", _open_redis),
    ]


def _open_http(url: str, timeout_s: float) -> Registry:
    try:
        from mooncake_transfer.registry.http import open_http
    except ImportError as error:
        raise _missing("registry-http", url, error) from error
    return open_http(url, timeout_s)


def _open_etcd(url: str, timeout_s: float) -> Registry:
    try:
        from mooncake_transfer.registry.etcd import open_etcd
    except ImportError as error:
        raise _missing("etcd", url, error) from error
    return open_etcd(url, timeout_s)


def _open_redis(url: str, timeout_s: float) -> Registry:
    try:
        from mooncake_transfer.registry.redis import open_redis
    except ImportError as error:
        raise _missing("redis", url, error) from error
    return open_redis(url, timeout_s)


def _missing(extra: str, url: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"registry {url.partition(':')[0]}: needs a library that is not installed ({error}); "
        f'pip install "mooncake-transfer[{extra}]"'
    )
