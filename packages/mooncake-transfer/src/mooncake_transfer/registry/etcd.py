"""``etcd://`` and ``etcds://``: an etcd cluster, version 3.4 or later, by its JSON gateway, with leases."""

from __future__ import annotations

import base64
import itertools
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from mooncake_transfer._errors import ConfigError, RegistryUnavailable
from mooncake_transfer.registry.exchange import Answer, Exchange
from mooncake_transfer.registry.url import RegistryUrl, parse_url

__all__ = ["EtcdRegistry", "open_etcd"]

DEFAULT_PORT = 2379
# A cluster takes 128 operations in a transaction unless told otherwise, and a question counts twice.
BATCH = 50
# Of gRPC, as the gateway reports them.
NOT_FOUND, UNAUTHENTICATED = 5, 16
AUTH_IS_OFF = "authentication is not enabled"

log = logging.getLogger(__name__)


class EtcdRefused(RegistryUnavailable):
    """The cluster answered, with an error; ``code`` is gRPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class EtcdRegistry:
    """Entries as keys of an etcd cluster, all on one lease. See ``Registry``."""

    def __init__(self, url: RegistryUrl, timeout_s: float) -> None:
        self.where = url.where
        self._exchange = Exchange(url, timeout_s)
        self._user = url.username
        self._password = url.password
        self._lock = threading.Lock()
        self._token: str | None = None
        self._authenticated = not url.username
        self._lease: str | None = None

    def get(self, key: str) -> bytes | None:
        """As ``Registry.get``."""
        found = self._ask("/v3/kv/range", {"key": _text(key.encode())}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def list(self, prefix: str) -> dict[str, bytes]:
        """As ``Registry.list``."""
        start = prefix.encode()
        # Keys are ASCII, so the last byte can always be counted up.
        end = start[:-1] + bytes([start[-1] + 1]) if start else b"\0"
        answer = self._ask("/v3/kv/range", {"key": _text(start or b"\0"), "rangeEnd": _text(end)})
        pairs = ((base64.b64decode(kv["key"]), kv.get("value", "")) for kv in answer.get("kvs", []))
        return {key.decode(errors="replace"): base64.b64decode(value) for key, value in pairs}

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """As ``Registry.replace``; lifetimes are whole seconds, rounded up."""
        for last in (False, True):
            lease = self._require_lease(ttl_s)
            put = {"requestPut": {"key": _text(key.encode()), "value": _text(new), "lease": lease}}
            try:
                answer = self._ask("/v3/kv/txn", {"compare": [_compare(key, old)], "success": [put]})
                return bool(answer.get("succeeded", False))
            except EtcdRefused as error:
                # The lease ran out while nothing was renewed, or the cluster lost it with everything else.
                if error.code != NOT_FOUND or last:
                    raise
                self._forget_lease(lease)
        raise AssertionError("the second try returns or raises")

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        """As ``Registry.renew``: one message keeps the lease, others look if the entries are still ours."""
        lease = self._lease
        if lease is None:
            return set(entries)
        kept = self._ask("/v3/lease/keepalive", {"ID": lease}).get("result", {})
        if int(kept.get("TTL", 0)) <= 0:
            self._forget_lease(lease)
            return set(entries)
        lost: set[str] = set()
        for batch in _batches(entries):
            questions = [{"requestTxn": {"compare": [_compare(key, value)]}} for key, value in batch.items()]
            answers = self._ask("/v3/kv/txn", {"success": questions}).get("responses", [])
            for key, answer in zip(batch, answers, strict=True):
                # One field, spelt response_txn or responseTxn: that differs between versions of the gateway.
                (inner,) = answer.values()
                if not inner.get("succeeded", False):
                    lost.add(key)
        return lost

    def remove(self, entries: Mapping[str, bytes]) -> None:
        """As ``Registry.remove``."""
        for batch in _batches(entries):
            deletions = [
                {
                    "requestTxn": {
                        "compare": [_compare(key, value)],
                        "success": [{"requestDeleteRange": {"key": _text(key.encode())}}],
                    }
                }
                for key, value in batch.items()
            ]
            self._ask("/v3/kv/txn", {"success": deletions})

    def interrupt(self) -> None:
        """As ``Interruptible.interrupt``."""
        self._exchange.interrupt()

    def close(self) -> None:
        """As ``Registry.close``."""
        self._exchange.close()

    def _require_lease(self, ttl_s: float) -> str:
        with self._lock:
            if self._lease is None:
                self._lease = self._ask("/v3/lease/grant", {"TTL": math.ceil(ttl_s)})["ID"]
            return self._lease

    def _forget_lease(self, lease: str) -> None:
        with self._lock:
            if self._lease == lease:
                self._lease = None

    def _ask(self, path: str, question: Mapping[str, object]) -> dict[str, Any]:
        if not self._authenticated:
            self._authenticate()
        try:
            return self._send(path, question)
        except EtcdRefused as error:
            if error.code != UNAUTHENTICATED or not self._user:
                raise
        except RegistryUnavailable:
            # A token names the moment it was given at, in the cluster's own counting. A cluster that was set
            # up anew waits for that moment before it answers, so the next question comes with a new token.
            self._authenticated = not self._user
            raise
        self._authenticate()  # tokens run out, and a restarted cluster knows none
        return self._send(path, question)

    def _authenticate(self) -> None:
        self._token = None
        try:
            answer = self._send("/v3/auth/authenticate", {"name": self._user, "password": self._password})
            self._token = answer["token"]
        except EtcdRefused as error:
            if AUTH_IS_OFF not in str(error):
                raise
            # So it is after a cluster lost everything, users included.
            log.warning("registry %s asks nobody for a password; %r goes on without", self.where, self._user)
        self._authenticated = True

    def _send(self, path: str, question: Mapping[str, object]) -> dict[str, Any]:
        token = self._token
        answer = self._exchange.send(
            "POST",
            path,
            content=msgspec.json.encode(question),
            headers={"Authorization": token} if token else None,
        )
        return self._decode(path, answer)

    def _decode(self, path: str, answer: Answer) -> dict[str, Any]:
        try:
            body = msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise RegistryUnavailable(
                f"registry {self.where} answers {path} with status {answer.status} and no JSON ({error}); "
                "its JSON gateway (etcd 3.4 or later, --enable-grpc-gateway) is needed"
            ) from None
        if answer.status == 200 and "error" not in body:
            return body
        reason = body.get("message") or body.get("error")
        raise EtcdRefused(
            f"registry {self.where} refuses {path}: {reason}; check user, password and permissions",
            int(body.get("code", 0)),
        )


def _compare(key: str, value: bytes | None) -> dict[str, object]:
    name = _text(key.encode())
    if value is None:
        return {"key": name, "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
    return {"key": name, "target": "VALUE", "result": "EQUAL", "value": _text(value)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _batches(entries: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    items = iter(entries.items())
    while batch := dict(itertools.islice(items, BATCH)):
        yield batch


def open_etcd(url: str, timeout_s: float) -> EtcdRegistry:
    """Open ``etcd[s]://[user:password@]host[:port][,host...][?ca=FILE&cert=FILE&key=FILE]``.

    Raises ConfigError.
    """
    parsed = parse_url(url, default_port=DEFAULT_PORT, secure=url.startswith("etcds:"))
    if parsed.path:
        raise ConfigError(f"registry {parsed.where} has a path; write etcd://host:2379")
    if bool(parsed.username) != bool(parsed.password):
        raise ConfigError(f"registry {parsed.where} needs both user and password, or neither")
    return EtcdRegistry(parsed, timeout_s)
