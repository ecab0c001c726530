"""``http://`` and ``https://``: the server that ``mooncake metadata serve`` runs, as engines use it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from mooncake_transfer._errors import ConfigError, RegistryUnavailable
from mooncake_transfer.registry.exchange import Answer, Exchange
from mooncake_transfer.registry.url import RegistryUrl, parse_url
from mooncake_transfer.registry.wire import DEFAULT_PORT, Lost, Removal, Renewal, etag

__all__ = ["HttpRegistry", "open_http"]

BATCH = 1000

Decoded = TypeVar("Decoded")


class HttpRegistry:
    """A client of the metadata server. See ``Registry``."""

    def __init__(self, url: RegistryUrl, timeout_s: float) -> None:
        self.where = url.where
        token = {"Authorization": f"Bearer {url.password}"} if url.password else {}
        self._exchange = Exchange(url, timeout_s, token)

    def get(self, key: str) -> bytes | None:
        """As ``Registry.get``."""
        answer = self._exchange.send("GET", "/v1/entry", params={"key": key})
        return None if answer.status == 404 else self._expect(answer, 200).body

    def list(self, prefix: str) -> dict[str, bytes]:
        """As ``Registry.list``."""
        answer = self._exchange.send("GET", "/v1/entries", params={"prefix": prefix})
        return self._decode(self._expect(answer, 200), dict[str, bytes])

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """As ``Registry.replace``."""
        condition = {"If-None-Match": "*"} if old is None else {"If-Match": f'"{etag(old)}"'}
        answer = self._exchange.send(
            "PUT", "/v1/entry", params={"key": key, "ttl_s": str(ttl_s)}, content=new, headers=condition
        )
        return answer.status != 412 and self._expect(answer, 204) is answer

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        """As ``Registry.renew``."""
        lost: set[str] = set()
        for tags in _tags(entries):
            body = msgspec.json.encode(Renewal(ttl_s, tags))
            answer = self._exchange.send("POST", "/v1/entries/renew", content=body)
            lost |= self._decode(self._expect(answer, 200), Lost).keys
        return lost

    def remove(self, entries: Mapping[str, bytes]) -> None:
        """As ``Registry.remove``."""
        for tags in _tags(entries):
            body = msgspec.json.encode(Removal(tags))
            self._expect(self._exchange.send("POST", "/v1/entries/remove", content=body), 204)

    def interrupt(self) -> None:
        """As ``Interruptible.interrupt``."""
        self._exchange.interrupt()

    def close(self) -> None:
        """As ``Registry.close``."""
        self._exchange.close()

    def _expect(self, answer: Answer, status: int) -> Answer:
        if answer.status == status:
            return answer
        remedy = (
            "put the token into the URL (http://:TOKEN@host:port)"
            if answer.status == 401
            else ("check that this is the address of a `mooncake metadata serve`")
        )
        raise RegistryUnavailable(
            f"registry {self.where} answers {answer.status}: {answer.body[:200].decode(errors='replace')}; "
            + remedy
        )

    def _decode(self, answer: Answer, kind: type[Decoded]) -> Decoded:
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.MsgspecError as error:
            raise RegistryUnavailable(
                f"registry {self.where} answers with something else than a metadata server: {error}"
            ) from None


def _tags(entries: Mapping[str, bytes]) -> Iterator[dict[str, str]]:
    items = iter(entries.items())
    while batch := {key: etag(value) for key, value in itertools.islice(items, BATCH)}:
        yield batch


def open_http(url: str, timeout_s: float) -> HttpRegistry:
    """Open ``http[s]://[:TOKEN@]host[:port][,host...][?ca=FILE&cert=FILE&key=FILE]``. Raises ConfigError."""
    parsed = parse_url(url, default_port=DEFAULT_PORT, secure=url.startswith("https:"))
    if parsed.path or parsed.username:
        raise ConfigError(f"registry {parsed.where} has a path or user name; write http://:TOKEN@host:port")
    return HttpRegistry(parsed, timeout_s)
