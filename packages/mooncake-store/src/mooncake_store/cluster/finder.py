"""Finds the leader of a cluster, for clients."""

from __future__ import annotations

from mooncake_store._errors import MasterUnreachable
from mooncake_store.cluster.finding import open_coordination

__all__ = ["LeaderFinder"]


class LeaderFinder:
    """Asks the coordination of one cluster who leads. Thread-safe."""

    def __init__(self, cluster: str, timeout_s: float) -> None:
        """``timeout_s`` limits each question. Raises ConfigError for a URL that cannot work."""
        self._coordination = open_coordination(cluster, timeout_s)

    def address(self) -> str:
        """``host:port`` of the leader. Raises MasterUnreachable when there is none now."""
        leader = self._coordination.leader()
        if leader is None:
            where = self._coordination.where
            raise MasterUnreachable(
                f"no master leads the cluster {where}; "
                f"start one with `mooncake store master --cluster {where}`"
            )
        return leader.address

    def close(self) -> None:
        """Give connections back. Safe to call twice."""
        self._coordination.close()
