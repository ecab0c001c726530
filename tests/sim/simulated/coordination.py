"""A coordination service as etcd is one, reached over the simulated network; and its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mooncake_store.cluster.contract import MARGIN, Leader, Term, lease_clock_s
from mooncake_store.errors import CoordinationUnavailable
from simulated.network import Network
from simulated.scheduler import Machine, Process

__all__ = ["Service", "SimCoordination"]

TIMEOUT_S = 0.25
R = TypeVar("R")


class Service:
    """Who leads, as the service's own machine knows it."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.process = Process("coordination", Machine("coordination"))
        self.available = True
        self.lossy = 0.0  # of answers
        self.faults = 0  # answers that were lost
        self._leader: Leader | None = None
        self._until_s = 0.0
        self._claim = ""
        self._epoch = 0
        self._claims = 0

    def forget(self) -> None:
        """It lost its disk."""
        self._leader, self._epoch, self._until_s = None, 0, 0.0

    def leader(self) -> Leader | None:
        return self._leader if self.network.scheduler.now_s < self._until_s else None

    def campaign(self, address: str, ttl_s: float, floor: int) -> tuple[Leader, str] | None:
        if self.leader() is not None:
            return None
        self._epoch = max(self._epoch, floor) + 1
        self._claims += 1
        self._leader, self._claim = Leader(address, self._epoch), f"claim {self._claims}"
        self._until_s = self.network.scheduler.now_s + ttl_s
        return self._leader, self._claim

    def keep(self, claim: str, ttl_s: float) -> bool:
        if self.leader() is None or self._claim != claim:
            return False
        self._until_s = self.network.scheduler.now_s + ttl_s
        return True

    def resign(self, claim: str) -> None:
        if self._claim == claim:
            self._until_s = 0.0


class SimCoordination:
    """``Coordination`` for one process."""

    where = "sim://cluster"

    def __init__(self, service: Service) -> None:
        self._service = service

    def campaign(self, address: str, ttl_s: float, floor: int) -> Term | None:
        asked_s = lease_clock_s()
        found = self._ask(lambda: self._service.campaign(address, ttl_s, floor))
        return None if found is None else Term(found[0], asked_s + ttl_s * (1 - MARGIN), found[1])

    def keep(self, term: Term, ttl_s: float) -> Term | None:
        asked_s = lease_clock_s()
        if not self._ask(lambda: self._service.keep(term.claim, ttl_s)):
            return None
        return Term(term.leader, asked_s + ttl_s * (1 - MARGIN), term.claim)

    def resign(self, term: Term) -> None:
        self._ask(lambda: self._service.resign(term.claim))

    def leader(self) -> Leader | None:
        return self._ask(self._service.leader)

    def close(self) -> None:
        """Nothing is kept open."""

    def _ask(self, question: Callable[[], R]) -> R:
        network = self._service.network
        scheduler = network.scheduler
        here, there = scheduler.here().process, self._service.process
        until_s = scheduler.now_s + TIMEOUT_S
        scheduler.block(scheduler.now_s + network.latency_s())
        if not self._service.available or network.blocked(here, there):
            scheduler.block(until_s)
            raise CoordinationUnavailable("the service does not answer")
        answer = question()
        lost = scheduler.random.random() < self._service.lossy
        self._service.faults += lost
        if lost or network.blocked(there, here):
            scheduler.block(until_s)
            raise CoordinationUnavailable("the answer was lost")
        scheduler.block(scheduler.now_s + network.latency_s())
        return answer
