"""``etcd://`` and ``etcds://``: one key on a lease, and one that counts epochs.

The epoch is counted, and not a revision of etcd, so that it stays small: versions of objects begin with it.
"""

from __future__ import annotations

import base64
import contextlib
import math
from typing import Any

import msgspec

from mooncake_store._errors import CoordinationUnavailable
from mooncake_store.cluster.contract import MARGIN, Leader, Term, lease_clock_s
from mooncake_transfer.errors import RegistryUnavailable
from mooncake_transfer.registry.etcd_client import NOT_FOUND, EtcdClient, EtcdRefused, as_text

__all__ = ["EtcdCoordination"]

RANGE, TXN = "/v3/kv/range", "/v3/kv/txn"
GRANT, KEEP, REVOKE = "/v3/lease/grant", "/v3/lease/keepalive", "/v3/lease/revoke"


class EtcdCoordination:
    """A leadership is a key that etcd removes when its lease is not kept. See ``Coordination``.

    etcd counts lifetimes in whole seconds, from the moment it hears of them, by a clock that nobody sets, and
    gives at least one and a half times its election timeout (2 s by default); after a change of its own
    leader it counts anew. So a term ends here before it ends there.
    """

    def __init__(self, client: EtcdClient, name: str, where: str) -> None:
        self.where = where
        self._client = client
        self._key = as_text(f"mooncake/store/{name}/leader".encode())
        self._epoch_key = as_text(f"mooncake/store/{name}/epoch".encode())

    def campaign(self, address: str, ttl_s: float, floor: int) -> Term | None:
        """As ``Coordination.campaign``."""
        before = self._find(self._epoch_key)
        last = int(before) if before is not None else 0
        asked_s = lease_clock_s()
        granted = self._ask(GRANT, {"TTL": math.ceil(ttl_s)})
        lease = str(granted["ID"])
        leader = Leader(address, max(last, floor) + 1)
        made = None
        try:
            made = self._make(leader, before, lease)
        finally:
            if made is None:  # lost to another, or nobody knows: the key, if it is there, goes with the lease
                self._revoke(lease)
        return None if made is None else Term(leader, _until_s(asked_s, granted), f"{lease}/{made}")

    def keep(self, term: Term, ttl_s: float) -> Term | None:
        """As ``Coordination.keep``."""
        lease, made = term.claim.split("/")
        asked_s = lease_clock_s()
        try:
            kept = self._ask(KEEP, {"ID": lease}).get("result", {})
        except EtcdGone:
            return None
        if int(kept.get("TTL", 0)) <= 0:
            return None
        # A lease says nothing about a key that an operator removed.
        if not self._ask(TXN, {"compare": [self._made_at(made)]}).get("succeeded", False):
            return None
        return Term(term.leader, _until_s(asked_s, kept), term.claim)

    def resign(self, term: Term) -> None:
        """As ``Coordination.resign``."""
        with contextlib.suppress(EtcdGone):
            self._ask(REVOKE, {"ID": term.claim.split("/")[0]})

    def leader(self) -> Leader | None:
        """As ``Coordination.leader``."""
        value = self._find(self._key)
        return msgspec.json.decode(value, type=Leader) if value is not None else None

    def close(self) -> None:
        """As ``Coordination.close``."""
        self._client.close()

    def _find(self, key: str) -> bytes | None:
        found = self._ask(RANGE, {"key": key}).get("kvs", [])
        return base64.b64decode(found[0]["value"]) if found else None

    def _make(self, leader: Leader, last_epoch: bytes | None, lease: str) -> int | None:
        """The revision at which the leader's key was made; None when it, or another epoch, was there."""
        epoch = str(leader.epoch).encode()
        same: dict[str, str] = {"key": self._epoch_key, "result": "EQUAL"}
        if last_epoch is None:
            same |= {"target": "CREATE", "createRevision": "0"}
        else:
            same |= {"target": "VALUE", "value": as_text(last_epoch)}
        puts = [
            {"key": self._key, "value": as_text(msgspec.json.encode(leader)), "lease": lease},
            {"key": self._epoch_key, "value": as_text(epoch)},
        ]
        question = {
            "compare": [self._made_at("0"), same],
            "success": [{"requestPut": put} for put in puts],
        }
        answer = self._ask(TXN, question)
        return int(answer["header"]["revision"]) if answer.get("succeeded", False) else None

    def _made_at(self, revision: str) -> dict[str, str]:
        return {"key": self._key, "target": "CREATE", "result": "EQUAL", "createRevision": revision}

    def _revoke(self, lease: str) -> None:
        with contextlib.suppress(CoordinationUnavailable):
            self._ask(REVOKE, {"ID": lease})

    def _ask(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._client.ask(path, question)
        except EtcdRefused as error:
            kind = EtcdGone if error.code == NOT_FOUND else CoordinationUnavailable
            raise kind(f"cluster {self.where}: {error}") from error
        except RegistryUnavailable as error:
            raise CoordinationUnavailable(f"cluster {self.where}: {error}") from error


class EtcdGone(CoordinationUnavailable):
    """etcd knows no such lease."""


def _until_s(asked_s: float, granted: dict[str, Any]) -> float:
    return asked_s + int(granted["TTL"]) * (1 - MARGIN)
