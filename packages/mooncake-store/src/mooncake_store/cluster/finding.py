"""Opens the coordination of a cluster by its URL."""

from __future__ import annotations

import re
from pathlib import Path

from mooncake_store._errors import ConfigError
from mooncake_store.cluster.contract import Coordination
from mooncake_store.cluster.sqlite import SqliteCoordination
from mooncake_transfer.errors import ConfigError as TransferConfigError
from mooncake_transfer.registry.url import RegistryUrl, parse_url

__all__ = ["is_cluster", "open_coordination"]

NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
FORMS = "etcd[s]://HOST:PORT,HOST:PORT/NAME, redis[s]://HOST:PORT[/DATABASE]/NAME or sqlite:FILE"


def is_cluster(master: str) -> bool:
    """Whether this is the URL of a cluster, and not the address of one master."""
    return "://" in master or master.startswith("sqlite:")


def open_coordination(url: str, timeout_s: float) -> Coordination:
    """Open the coordination at ``url`` without connecting to it yet; ``timeout_s`` limits each call.

    ``etcd[s]://[user:password@]host[:port][,host...]/NAME[?ca=FILE&cert=FILE&key=FILE]``,
    ``redis[s]://[[user]:password@]host[:port][/database]/NAME``, ``sqlite:FILE``; a password may also come
    from a file: ``?password_file=FILE``. Raises ConfigError.
    """
    scheme, _, rest = url.partition(":")
    extra = {"etcd": "etcd", "etcds": "etcd", "redis": "redis", "rediss": "redis"}.get(scheme)
    if scheme == "sqlite":
        if not rest:
            raise ConfigError("cluster sqlite: names no file; write sqlite:FILE")
        return SqliteCoordination(Path(rest), timeout_s, url)
    if extra is None:
        raise ConfigError(f"cluster {scheme + ':...'} has no known scheme; write {FORMS}")
    try:
        return _open_etcd(url, timeout_s) if extra == "etcd" else _open_redis(url, timeout_s)
    except TransferConfigError as error:
        raise ConfigError(f"cluster: {error}") from error
    except ImportError as error:
        raise ConfigError(
            f"cluster {scheme}: needs a library that is not installed ({error}); "
            f'pip install "mooncake-store[{extra}]"'
        ) from error


def _open_etcd(url: str, timeout_s: float) -> Coordination:
    from mooncake_store.cluster.etcd import EtcdCoordination
    from mooncake_transfer.registry.etcd_client import DEFAULT_PORT, EtcdClient

    parsed = parse_url(url, default_port=DEFAULT_PORT, secure=url.startswith("etcds:"))
    return EtcdCoordination(EtcdClient(parsed, timeout_s), _name(parsed, parsed.path), parsed.where)


def _open_redis(url: str, timeout_s: float) -> Coordination:
    from mooncake_store.cluster.redis import RedisCoordination
    from mooncake_transfer.registry.redis import DEFAULT_PORT, redis_client

    parsed = parse_url(url, default_port=DEFAULT_PORT, secure=url.startswith("rediss:"))
    database, _, name = parsed.path.rpartition("/")
    if len(parsed.endpoints) > 1:
        raise ConfigError(f"cluster {parsed.where} names several servers; Redis is used as one")
    if not (database or "0").isdecimal():
        raise ConfigError(f"cluster {parsed.where}: {database!r} is no number of a database")
    client = redis_client(parsed, int(database or 0), timeout_s)
    return RedisCoordination(client, _name(parsed, name), parsed.where)


def _name(url: RegistryUrl, name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"cluster {url.where} has no usable name ({name!r}), of letters, digits, '.', '_', '-'; "
            f"write {FORMS}"
        )
    return name
