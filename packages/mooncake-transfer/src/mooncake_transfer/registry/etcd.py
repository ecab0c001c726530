"""``etcd://`` and ``etcds://``: an etcd cluster, version 3.4 or later, by its JSON gateway, with leases."""

from __future__ import annotations

import base64
import itertools
import math
import threading
from collections.abc import Iterator, Mapping

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.registry.etcd_client import DEFAULT_PORT, NOT_FOUND, EtcdClient, EtcdRefused, as_text
from mooncake_transfer.registry.url import parse_url

__all__ = ["EtcdRegistry", "open_etcd"]

# A cluster takes 128 operations in a transaction unless told otherwise, and a question counts twice.
BATCH = 50


class EtcdRegistry:
    """Entries as keys of an etcd cluster, all on one lease. See ``Registry``."""

    def __init__(self, client: EtcdClient) -> None:
        self.where = client.where
        self._client = client
        self._lock = threading.Lock()
        self._lease: str | None = None

    def get(self, key: str) -> bytes | None:
        """As ``Registry.get``."""
        found = self._client.ask("/v3/kv/range", {"key": as_text(key.encode())}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def list(self, prefix: str) -> dict[str, bytes]:
        """As ``Registry.list``."""
        start = prefix.encode()
        # Keys are ASCII, so the last byte can always be counted up.
        end = start[:-1] + bytes([start[-1] + 1]) if start else b"\0"
        answer = self._client.ask("/v3/kv/range", {"key": as_text(start or b"\0"), "rangeEnd": as_text(end)})
        pairs = ((base64.b64decode(kv["key"]), kv.get("value", "")) for kv in answer.get("kvs", []))
        return {key.decode(errors="replace"): base64.b64decode(value) for key, value in pairs}

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """As ``Registry.replace``; lifetimes are whole seconds, rounded up."""
        for last in (False, True):
            lease = self._require_lease(ttl_s)
            put = {"requestPut": {"key": as_text(key.encode()), "value": as_text(new), "lease": lease}}
            try:
                answer = self._client.ask("/v3/kv/txn", {"compare": [_compare(key, old)], "success": [put]})
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
        kept = self._client.ask("/v3/lease/keepalive", {"ID": lease}).get("result", {})
        if int(kept.get("TTL", 0)) <= 0:
            self._forget_lease(lease)
            return set(entries)
        lost: set[str] = set()
        for batch in _batches(entries):
            questions = [{"requestTxn": {"compare": [_compare(key, value)]}} for key, value in batch.items()]
            answers = self._client.ask("/v3/kv/txn", {"success": questions}).get("responses", [])
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
                        "success": [{"requestDeleteRange": {"key": as_text(key.encode())}}],
                    }
                }
                for key, value in batch.items()
            ]
            self._client.ask("/v3/kv/txn", {"success": deletions})

    def interrupt(self) -> None:
        """As ``Interruptible.interrupt``."""
        self._client.interrupt()

    def close(self) -> None:
        """As ``Registry.close``."""
        self._client.close()

    def _require_lease(self, ttl_s: float) -> str:
        with self._lock:
            if self._lease is None:
                self._lease = self._client.ask("/v3/lease/grant", {"TTL": math.ceil(ttl_s)})["ID"]
            return self._lease

    def _forget_lease(self, lease: str) -> None:
        with self._lock:
            if self._lease == lease:
                self._lease = None


def _compare(key: str, value: bytes | None) -> dict[str, object]:
    name = as_text(key.encode())
    if value is None:
        return {"key": name, "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
    return {"key": name, "target": "VALUE", "result": "EQUAL", "value": as_text(value)}


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
    return EtcdRegistry(EtcdClient(parsed, timeout_s))
