"""``?cluster=NAME``: several clusters in one registry that do not see each other."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote_plus

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.registry.contract import Interruptible, Registry

__all__ = ["ClusterRegistry", "split_cluster"]

CLUSTERS = "mooncake/clusters/"
OPTION = "cluster="


class ClusterRegistry:
    """The part of another registry whose keys begin with the name of a cluster. See ``Registry``."""

    def __init__(self, inner: Registry, cluster: str) -> None:
        self._inner = inner
        self._prefix = f"{CLUSTERS}{quote(cluster, safe='')}/"
        self.where = f"{inner.where}?{OPTION}{quote(cluster, safe='')}"

    def get(self, key: str) -> bytes | None:
        """As ``Registry.get``."""
        return self._inner.get(self._prefix + key)

    def list(self, prefix: str) -> dict[str, bytes]:
        """As ``Registry.list``."""
        found = self._inner.list(self._prefix + prefix)
        return {key.removeprefix(self._prefix): value for key, value in found.items()}

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """As ``Registry.replace``."""
        return self._inner.replace(self._prefix + key, old, new, ttl_s)

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        """As ``Registry.renew``."""
        lost = self._inner.renew(self._within(entries), ttl_s)
        return {key.removeprefix(self._prefix) for key in lost}

    def remove(self, entries: Mapping[str, bytes]) -> None:
        """As ``Registry.remove``."""
        self._inner.remove(self._within(entries))

    def interrupt(self) -> None:
        """As ``Interruptible.interrupt``, where the registry itself can be interrupted."""
        if isinstance(self._inner, Interruptible):
            self._inner.interrupt()

    def close(self) -> None:
        """As ``Registry.close``."""
        self._inner.close()

    def _within(self, entries: Mapping[str, bytes]) -> dict[str, bytes]:
        return {self._prefix + key: value for key, value in entries.items()}


def split_cluster(url: str) -> tuple[str, str]:
    """The URL without ``cluster=NAME``, and the name; empty when there is none. Raises ConfigError."""
    userinfo, at, rest = url.rpartition("@")  # a password may have a question mark
    base, _, query = rest.partition("?")
    options = query.split("&")
    names = [unquote_plus(option.removeprefix(OPTION)) for option in options if option.startswith(OPTION)]
    if not names:
        return url, ""
    if len(names) > 1 or not names[0]:
        raise ConfigError(f"registry {url.partition(':')[0]}:... needs one name after ?{OPTION}")
    others = "&".join(option for option in options if not option.startswith(OPTION))
    return userinfo + at + base + ("?" + others if others else ""), names[0]
