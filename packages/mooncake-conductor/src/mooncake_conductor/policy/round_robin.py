"""Every worker in turn: the baseline that cache-aware placement is measured against."""

from __future__ import annotations

from mooncake_conductor.policy.snapshot import Candidate, Placement, Snapshot

__all__ = ["RoundRobin"]


class RoundRobin:
    """The worker that was used least recently, whatever its cache or queue. Pure: the turn is in the
    snapshot."""

    name = "round_robin"

    def place(self, snapshot: Snapshot) -> Placement:
        """Choose the prefill and the decode worker whose turn it is."""
        prefill = min(snapshot.prefill, key=_turn)
        if prefill.role == "both":
            return Placement(prefill=prefill.url, decode=prefill.url, matched_tokens=prefill.matched_tokens)
        return Placement(
            prefill=prefill.url,
            decode=min(snapshot.decode, key=_turn).url,
            matched_tokens=prefill.matched_tokens,
        )


def _turn(worker: Candidate) -> tuple[int, str]:
    return worker.last_used, worker.url
