"""``redis://`` and ``rediss://``: one key that expires, and one that counts epochs.

Weaker than etcd: one server, which may forget a leadership when it crashes (its writes reach the disk later,
or never) and expires keys by the time of day, so that setting its clock can end a leadership early. Two
masters may then answer for a while; owners of memory follow the higher epoch, so bytes are never mixed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import redis

from mooncake_store._errors import CoordinationUnavailable
from mooncake_store.cluster.contract import MARGIN, Leader, Term, lease_clock_s

__all__ = ["RedisCoordination"]

# Scripts, because looking and writing has to be one step. KEYS: leader, epoch.
CAMPAIGN = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
redis.call('SET', KEYS[1], string.format('%.0f', epoch) .. ' ' .. ARGV[1], 'PX', ARGV[2])
return epoch
"""
KEEP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
RESIGN = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Record(msgspec.Struct):
    """The key's value after its epoch; ``nonce`` tells two claims of one process apart."""

    address: str
    nonce: str


class RedisCoordination:
    """A leadership is a key that Redis expires. See ``Coordination``."""

    def __init__(self, client: redis.Redis, name: str, where: str) -> None:
        self.where = where
        self._redis = client
        # In braces, so that a cluster of Redis keeps both on one node.
        self._leader_key, self._epoch_key = (
            f"mooncake/store/{{{name}}}/{what}" for what in ("leader", "epoch")
        )
        self._campaign = client.register_script(CAMPAIGN)
        self._keep = client.register_script(KEEP)
        self._resign = client.register_script(RESIGN)

    def campaign(self, address: str, ttl_s: float, floor: int) -> Term | None:
        """As ``Coordination.campaign``."""
        record = msgspec.json.encode(Record(address, secrets.token_hex(8))).decode()
        asked_s = lease_clock_s()
        arguments: list[str | int] = [record, _milliseconds(ttl_s), floor]
        epoch = int(self._ask(lambda: self._campaign([self._leader_key, self._epoch_key], arguments)))
        if not epoch:
            return None
        return Term(Leader(address, epoch), asked_s + ttl_s * (1 - MARGIN), f"{epoch} {record}")

    def keep(self, term: Term, ttl_s: float) -> Term | None:
        """As ``Coordination.keep``."""
        asked_s = lease_clock_s()
        if not self._ask(lambda: self._keep([self._leader_key], [term.claim, _milliseconds(ttl_s)])):
            return None
        return Term(term.leader, asked_s + ttl_s * (1 - MARGIN), term.claim)

    def resign(self, term: Term) -> None:
        """As ``Coordination.resign``."""
        self._ask(lambda: self._resign([self._leader_key], [term.claim]))

    def leader(self) -> Leader | None:
        """As ``Coordination.leader``."""
        value: bytes | None = self._ask(lambda: self._redis.get(self._leader_key))
        if value is None:
            return None
        epoch, _, record = value.partition(b" ")
        return Leader(msgspec.json.decode(record, type=Record).address, int(epoch))

    def close(self) -> None:
        """As ``Coordination.close``."""
        self._redis.close()

    def _ask(self, question: Callable[[], Any]) -> Any:
        for last in (False, True):
            try:
                return question()
            except redis.RedisError as error:
                # Of a connection that was kept: the server may have closed it, or been restarted, since.
                if isinstance(error, redis.ConnectionError) and not last:
                    continue
                raise CoordinationUnavailable(
                    f"cluster {self.where} cannot be used ({type(error).__name__}: {error}); "
                    "check that it runs and that address, database, certificates, user and password fit"
                ) from error
        raise AssertionError("the second try returns or raises")


def _milliseconds(ttl_s: float) -> int:
    return max(int(ttl_s * 1000), 1)
