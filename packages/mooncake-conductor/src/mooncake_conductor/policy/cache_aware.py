"""Least tokens to compute before the first one comes out: what the cache does not cover, and what is queued
ahead."""

from __future__ import annotations

from mooncake_conductor.policy.snapshot import Candidate, Placement, Snapshot

__all__ = ["CacheAware"]


class CacheAware:
    """Prefill goes where ``uncached prompt tokens + queued tokens`` is least, decode where the least is
    queued.

    Both terms are in tokens, so the policy has nothing to tune: a cached prefix draws a request as strongly
    as an equally long queue pushes it away, and affinity never piles up load without bound. Ties go to the
    worker that was used least recently, then by URL.
    """

    name = "cache_aware"

    def place(self, snapshot: Snapshot) -> Placement:
        """Choose the cheapest prefill worker, and the least loaded decode worker to go with it."""
        prefill = min(snapshot.prefill, key=lambda worker: prefill_cost(worker, snapshot.prompt_tokens))
        if prefill.role == "both":
            return Placement(prefill=prefill.url, decode=prefill.url, matched_tokens=prefill.matched_tokens)
        decode = min(snapshot.decode, key=lambda worker: (worker.queued_tokens, worker.last_used, worker.url))
        return Placement(prefill=prefill.url, decode=decode.url, matched_tokens=prefill.matched_tokens)


def prefill_cost(worker: Candidate, prompt_tokens: int) -> tuple[int, int, str]:
    """Sort key of a prefill candidate: tokens ahead of the first output token, then the ties."""
    uncached = max(0, prompt_tokens - worker.matched_tokens)
    return uncached + worker.queued_tokens, worker.last_used, worker.url
