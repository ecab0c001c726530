"""``redis://`` and ``rediss://``: a Redis server, version 4 or later, with its own expiry of keys."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from mooncake_transfer._errors import ConfigError, RegistryUnavailable
from mooncake_transfer.registry.sockets import Sockets
from mooncake_transfer.registry.url import RegistryUrl, parse_url

__all__ = ["DEFAULT_PORT", "RedisRegistry", "open_redis", "redis_client"]

DEFAULT_PORT = 6379
BATCH = 500

# Scripts, because comparing and writing has to be one step.
REPLACE = """
local value = redis.call('GET', KEYS[1])
if (ARGV[1] == '' and value) or (ARGV[1] ~= '' and value ~= ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
RENEW = """
local lost = {}
for index, key in ipairs(KEYS) do
  if redis.call('GET', key) ~= ARGV[index + 1] then lost[#lost + 1] = key
  else redis.call('PEXPIRE', key, ARGV[1]) end
end
return lost
"""
REMOVE = """
for index, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[index] then redis.call('DEL', key) end
end
"""

Result = TypeVar("Result")


def redis_client(
    url: RegistryUrl,
    database: int,
    timeout_s: float,
    connected: Callable[[Any], None] | None = None,
) -> redis.Redis:
    """A client that tries once, and whose every wait ends after ``timeout_s``.

    ``connected`` gets each new ``redis.Connection`` and has to call its ``on_connect()``, as None does.
    """
    host, port = url.endpoints[0]
    options: dict[str, Any] = {"redis_connect_func": connected}
    if url.context is not None:
        files = {f"ssl_{option}": url.tls.get(name) for name, option in TLS_FILES.items()}
        options |= {"ssl": True, **files}
    return redis.Redis(
        host,
        port,
        database,
        username=url.username or None,
        password=url.password or None,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        **options,
    )


class RedisRegistry:
    """Entries as keys of a Redis database. See ``Registry``. Values must not be empty."""

    def __init__(self, url: RegistryUrl, database: int, timeout_s: float) -> None:
        self.where = url.where
        self._sockets = Sockets()
        self._redis = redis_client(url, database, timeout_s, self._greet)
        self._replace = self._redis.register_script(REPLACE)
        self._renew = self._redis.register_script(RENEW)
        self._remove = self._redis.register_script(REMOVE)

    def get(self, key: str) -> bytes | None:
        """As ``Registry.get``."""
        value: Any = self._ask(lambda: self._redis.get(key))
        return value if value is None else bytes(value)

    def list(self, prefix: str) -> dict[str, bytes]:
        """As ``Registry.list``."""
        return self._ask(lambda: self._list(prefix))

    def _list(self, prefix: str) -> dict[str, bytes]:
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", prefix) + "*"
        found: dict[str, bytes] = {}
        for keys in _batches(dict.fromkeys(self._redis.scan_iter(match=pattern, count=BATCH))):
            values: Any = self._redis.mget(list(keys))
            pairs = zip(keys, values, strict=True)
            found |= {key.decode(): value for key, value in pairs if value is not None}
        return dict(sorted(found.items()))

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """As ``Registry.replace``."""
        arguments: Sequence[Any] = [old or b"", new, _milliseconds(ttl_s)]
        return bool(self._ask(lambda: self._replace(keys=[key], args=arguments)))

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        """As ``Registry.renew``."""
        lost: set[str] = set()
        for batch in _batches(entries):
            keys, arguments = list(batch), [_milliseconds(ttl_s), *batch.values()]
            lost |= {key.decode() for key in self._run(self._renew, keys, arguments)}
        return lost

    def remove(self, entries: Mapping[str, bytes]) -> None:
        """As ``Registry.remove``."""
        for batch in _batches(entries):
            self._run(self._remove, list(batch), list(batch.values()))

    def interrupt(self) -> None:
        """As ``Interruptible.interrupt``."""
        self._sockets.end()

    def close(self) -> None:
        """As ``Registry.close``."""
        self._redis.close()

    def _greet(self, connection: Any) -> None:
        self._sockets.add(connection._sock)  # Nothing public of the library ends a wait without closing.
        connection.on_connect()

    def _run(self, script: Callable[..., Any], keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return self._ask(lambda: script(keys=keys, args=arguments))

    def _ask(self, question: Callable[[], Result]) -> Result:
        try:
            return self._ask_twice(question)
        except redis.RedisError as error:
            raise RegistryUnavailable(
                f"registry {self.where} cannot be used ({type(error).__name__}: {error}); "
                "check that it runs and that address, database, certificates, user and password fit"
            ) from error

    def _ask_twice(self, question: Callable[[], Result]) -> Result:
        try:
            return question()
        except redis.ConnectionError:
            # Of a connection that was kept: the server may have closed it, or have been restarted, since.
            if self._sockets.ended:
                raise
            return question()


TLS_FILES = {"ca": "ca_certs", "cert": "certfile", "key": "keyfile"}


def _milliseconds(ttl_s: float) -> int:
    return max(int(ttl_s * 1000), 1)


def _batches(entries: Mapping[Any, Result]) -> Iterator[dict[Any, Result]]:
    items = iter(entries.items())
    while batch := dict(itertools.islice(items, BATCH)):
        yield batch


def open_redis(url: str, timeout_s: float) -> RedisRegistry:
    """Open ``redis[s]://[[user]:password@]host[:port][/db][?ca=FILE&cert=FILE&key=FILE]``.

    Raises ConfigError.
    """
    parsed = parse_url(url, default_port=DEFAULT_PORT, secure=url.startswith("rediss:"))
    if len(parsed.endpoints) > 1:
        raise ConfigError(f"registry {parsed.where} names several servers; Redis is used as one")
    if not (parsed.path or "0").isdecimal():
        raise ConfigError(f"registry {parsed.where}: {parsed.path!r} is no number of a database")
    return RedisRegistry(parsed, int(parsed.path or 0), timeout_s)
