"""Live placement by the policies of ``kernels``, with what the conductor knows of its workers."""

from __future__ import annotations

import numpy as np

from mooncake_conductor.policy.kernels import View, draw, kernel_of
from mooncake_conductor.policy.snapshot import Candidate, Placement, Snapshot

__all__ = ["LIVE", "KernelPolicy"]

# Those that need no estimate of seconds.
LIVE = (
    "random",
    "least_requests",
    "least_tokens",
    "power_of_two",
    "sglang_cache_aware",
    "dynamo_cost",
    "lmetric",
    "preble_e2",
    "load_aware",
)


class KernelPolicy:
    """Prefill goes where the kernel says, decode where the least is queued.

    Ties go to the worker used longest ago, then by URL.
    """

    def __init__(self, name: str) -> None:
        """``name``: of :data:`LIVE`. Raises KeyError for others."""
        self.name = name
        self._choose = kernel_of(name)

    def place(self, snapshot: Snapshot) -> Placement:
        """See Policy."""
        workers = sorted(snapshot.prefill, key=_age)
        prefill = workers[self._choose(_view(snapshot, workers))]
        if prefill.role == "both":
            decode = prefill
        else:
            decode = min(snapshot.decode, key=lambda worker: (worker.queued_tokens, *_age(worker)))
        return Placement(prefill=prefill.url, decode=decode.url, matched_tokens=prefill.matched_tokens)


def _age(worker: Candidate) -> tuple[int, str]:
    return worker.last_used, worker.url


def _view(snapshot: Snapshot, workers: list[Candidate]) -> View:
    """The snapshot as kernels take it. Seconds are not known: a token stands for one; nothing is fetched."""
    prompt = max(1, snapshot.prompt_tokens)
    queued = np.array([worker.queued_tokens for worker in workers], np.int64)
    matched = np.array([min(worker.matched_tokens, prompt) for worker in workers], np.int64)
    turn = max(worker.last_used for worker in workers)
    never = np.full(len(workers), np.inf)
    return View(
        prompt=prompt,
        queue_s=queued.astype(np.float64),
        queued=queued,
        requests=np.array([worker.requests for worker in workers], np.int64),
        matched=matched,
        best=int(matched.max()),
        compute_s=(prompt - matched).astype(np.float64),
        fetch_s=never,
        busy_fetch_s=never,
        fetched_compute_s=0.0,
        turn=turn,
        draws=(draw(turn, 0), draw(turn, 1)),
    )
