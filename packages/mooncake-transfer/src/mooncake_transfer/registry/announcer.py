"""Keeps the entries of one engine in its registry, whatever happens to the registry."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TypeVar

import msgspec

from mooncake_transfer._errors import RegistryUnavailable
from mooncake_transfer._scarce import start_thread
from mooncake_transfer.registry.contract import Registry
from mooncake_transfer.registry.records import EngineRecord, RegionRecord, engine_key, region_key

__all__ = ["Announcer"]

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0
# Three renewals fit into a lifetime, so one lost answer does not lose the entry.
RENEWALS_PER_TTL = 3
CLAIM_TRIES = 4

Record = TypeVar("Record", EngineRecord, RegionRecord)

log = logging.getLogger(__name__)


class Announcer:
    """Announces a name and published regions, renews them, and brings them back after the registry lost them.

    The engine that claims a name last has it. The former holder notices at its next renewal, takes its
    regions back, says so in the log, and returns when the name is free again. Generations order the claims,
    also when a registry has lost everything and all engines announce anew at once. Holds no reference to an
    engine.
    """

    def __init__(self, registry: Registry, name: str, address: str, epoch: int, ttl_s: float) -> None:
        self._registry = registry
        self._name = name
        self._address = address
        self._epoch = epoch
        self._ttl_s = ttl_s
        self._generation = 0
        self._regions: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._asked = (
            1  # changes that were asked for, and those that a pass has tried to bring to the registry
        )
        self._tried = 0
        self._stopping = False
        # Of the thread only: what is in the registry, and the descriptors it was made from.
        self._held: dict[str, bytes] = {}
        self._sent: dict[str, bytes] = {}
        self._renew_at_s = 0.0
        self._failures = 0
        self._outranked = False
        # A daemon, because a thread that is none would keep an interpreter alive whose engine nobody closed.
        self._thread = threading.Thread(target=self._run, name="mooncake-announcer", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Begin, and wait until the name was announced once or the registry has failed to take it."""
        start_thread(self._thread)
        self._await_pass(timeout_s)

    @property
    def holds_name(self) -> bool:
        """Whether the name was this engine's when the registry last answered."""
        return engine_key(self._name) in self._held

    def publish(self, region: str, descriptor: bytes, timeout_s: float) -> None:
        """Announce a region from now on; waits as ``start`` does."""
        with self._changed:
            self._regions[region_key(self._name, region)] = descriptor
            self._ask()
        self._await_pass(timeout_s)

    def withdraw(self, region: str) -> None:
        """Take a region out of the registry, without waiting for it."""
        with self._changed:
            if self._regions.pop(region_key(self._name, region), None) is not None:
                self._ask()

    def stop(self, timeout_s: float) -> None:
        """Take everything back, if the registry answers, and end. Safe to call twice."""
        with self._changed:
            self._stopping = True
            self._ask()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("registry %s does not answer; entries are left to expire", self._registry.where)

    def _ask(self) -> None:
        self._asked += 1
        self._changed.notify_all()

    def _await_pass(self, timeout_s: float) -> None:
        with self._changed:
            wanted = self._asked
            self._changed.wait_for(lambda: self._tried >= wanted or self._stopping, timeout_s)

    def _run(self) -> None:
        delay_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._asked > self._tried, delay_s)
                if self._stopping:
                    break
                asked, regions = self._asked, dict(self._regions)
            delay_s = self._try(regions)
            with self._changed:
                self._tried = asked
                self._changed.notify_all()
        if self._held and not self._failures:
            self._leave()

    def _try(self, regions: dict[str, bytes]) -> float:
        """One pass; returns how long the next one has time."""
        period_s = self._ttl_s / RENEWALS_PER_TTL
        try:
            self._renew(period_s)
            self._announce(regions)
        except RegistryUnavailable as error:
            if not self._failures:
                log.warning("%r is not announced for now; connected peers go on: %s", self._name, error)
            self._failures += 1
            self._renew_at_s = 0.0
            longest_s = min(FIRST_RETRY_S * (1 << min(self._failures, 16)), LONGEST_RETRY_S, period_s)
            # Jitter: engines that lost the registry together must not come back together.
            return longest_s * random.uniform(0.5, 1)
        except Exception:
            # A third party's registry may raise anything; the name must come back all the same.
            log.exception("announcing %r in registry %s failed", self._name, self._registry.where)
            return period_s
        if self._failures:
            log.warning("registry %s answers again; %r is announced", self._registry.where, self._name)
            self._failures = 0
        return max(self._renew_at_s - time.monotonic(), 0.0)

    def _renew(self, period_s: float) -> None:
        # A pass that only brings a new region does not renew the others: publishing many would be quadratic.
        if time.monotonic() < self._renew_at_s:
            return
        if self._held:
            for key in self._registry.renew(self._held, self._ttl_s):
                del self._held[key]
        self._renew_at_s = time.monotonic() + period_s * random.uniform(0.8, 1)

    def _announce(self, regions: dict[str, bytes]) -> None:
        wanted = regions if self._claim_name() else {}
        name_key = engine_key(self._name)
        stale = {key: value for key, value in self._held.items() if key not in wanted and key != name_key}
        if stale:
            self._registry.remove(stale)
            for key in stale:
                del self._held[key]
        for key, descriptor in wanted.items():
            if key not in self._held or self._sent[key] is not descriptor:
                value = msgspec.json.encode(RegionRecord(self._epoch, self._generation, descriptor))
                if self._claim(key, value, RegionRecord) is None:
                    self._sent[key] = descriptor

    def _claim_name(self) -> bool:
        key = engine_key(self._name)
        if key in self._held:
            return True
        if not self._generation:
            holder = _decode(self._registry.get(key), EngineRecord)
            self._generation = max(time.time_ns() // 1_000_000, holder.generation + 1 if holder else 0)
        value = msgspec.json.encode(EngineRecord(self._address, self._epoch, self._generation))
        holder = self._claim(key, value, EngineRecord)
        if holder is not None and not self._outranked:
            log.warning(
                "name %r was claimed by a newer engine at %s; this one is reached as %s only",
                self._name,
                holder.address,
                self._address,
            )
        self._outranked = holder is not None
        return key in self._held

    def _claim(self, key: str, value: bytes, kind: type[Record]) -> Record | None:
        """Put an entry; returns the record of a newer engine that has it instead."""
        current = self._held.get(key)
        for _ in range(CLAIM_TRIES):
            if self._registry.replace(key, current, value, self._ttl_s):
                self._held[key] = value
                return None
            current = self._registry.get(key)
            holder = _decode(current, kind)
            if holder is not None and (holder.generation, holder.epoch) > (self._generation, self._epoch):
                self._held.pop(key, None)
                return holder
        raise RegistryUnavailable(
            f"registry {self._registry.where} gives {key!r} to somebody else again and again; trying later"
        )

    def _leave(self) -> None:
        try:
            self._registry.remove(self._held)
        except RegistryUnavailable as error:
            log.info("the entries of %r expire by themselves: %s", self._name, error)
        except Exception:  # a third party's registry may raise anything, and nobody waits for this
            log.exception("leaving registry %s failed", self._registry.where)


def _decode(value: bytes | None, kind: type[Record]) -> Record | None:
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError:
        return None  # nothing that an engine wrote; it is replaced
