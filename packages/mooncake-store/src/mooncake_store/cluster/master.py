"""A master of a cluster: leads, or waits for its turn."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

import msgspec

from mooncake_store._errors import CoordinationUnavailable, MasterNotLeading
from mooncake_store.cluster.candidate import Candidate
from mooncake_store.cluster.contract import Leader
from mooncake_store.cluster.finding import open_coordination
from mooncake_store.config import StoreConfig
from mooncake_store.master import Master
from mooncake_store.master.server import stand_by
from mooncake_store.protocol import StoreStats
from mooncake_transfer import TransferEngine

__all__ = ["ClusterMaster"]

# Of a term; an answer that takes longer could not keep it anyway.
CALL_PART = 0.25

log = logging.getLogger(__name__)


class ClusterMaster:
    """One of several masters of a store, of which one leads at a time. Thread-safe; a context manager.

    It answers clients while it leads; else it tells them that it does not. When the leader dies or cannot
    keep its leadership for ``leader_ttl_s``, another one is elected, and clients go there by themselves with
    what their segments hold: ``recovery`` of the configuration is always on.
    Close it before its engine.

    Attributes:
        engine: the engine it serves on.
    """

    def __init__(self, engine: TransferEngine, cluster: str, config: StoreConfig | None = None) -> None:
        """Stand for election, in the background. Raises ConfigError for a URL that cannot work."""
        self.engine = engine
        self._config = msgspec.structs.replace(config or StoreConfig(), recovery=True)
        ttl_s = self._config.leader_ttl_s
        self._coordination = open_coordination(cluster, ttl_s * CALL_PART)
        self._candidate = Candidate(
            self._coordination, engine.address, ttl_s, self._on_elected, self._on_deposed
        )
        self._changed = threading.Condition()
        self._master: Master | None = None
        stand_by(engine, self._explain)
        self._candidate.start()

    @property
    def address(self) -> str:
        """``host:port`` of its engine."""
        return self.engine.address

    @property
    def master(self) -> Master | None:
        """What serves while this one leads."""
        return self._master

    def leader(self) -> Leader | None:
        """Who leads the cluster now. Raises CoordinationUnavailable."""
        return self._coordination.leader()

    def wait_to_lead(self, timeout_s: float) -> Master:
        """Wait until this one leads. Raises MasterNotLeading after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._master is not None, timeout_s)
            if self._master is None:
                raise MasterNotLeading(f"not elected within {timeout_s:g} s: {self._explain()}")
            return self._master

    def stats(self) -> StoreStats:
        """The store's numbers. Raises MasterNotLeading while another one leads."""
        master = self._master
        if master is None:
            raise MasterNotLeading(self._explain())
        return master.stats()

    def close(self) -> None:
        """Resign and stop serving. Safe to call twice."""
        self._candidate.stop()
        stand_by(self.engine, None)
        self._coordination.close()

    def __enter__(self) -> ClusterMaster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_elected(self, epoch: int) -> None:
        master = Master(self.engine, self._config, office=_Office(self._candidate, epoch))
        with self._changed:
            self._master = master
            self._changed.notify_all()

    def _on_deposed(self, why: str) -> None:
        master, self._master = self._master, None
        if master is not None:
            master.close()

    def _explain(self) -> str:
        try:
            leader = self._coordination.leader()
        except CoordinationUnavailable as error:
            return f"the master at {self.address} does not lead, and who does is not known: {error}"
        if leader is None or leader.address == self.address:
            return f"the master at {self.address} does not lead, and nobody else does yet"
        return f"the master at {self.address} does not lead; that at {leader.address} does"


class _Office:
    """See ``Office``."""

    def __init__(self, candidate: Candidate, epoch: int) -> None:
        self.epoch = epoch
        self.tenure = candidate.tenure
        self._candidate = candidate

    def held(self) -> bool:
        return self._candidate.in_office(self.epoch)

    def outranked(self, epoch: int) -> None:
        self._candidate.step_down(epoch)
