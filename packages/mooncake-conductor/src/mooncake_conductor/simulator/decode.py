"""Decode instances: all sequences of one advance together, a token a step; a large batch makes long steps.

Each instance has a clock that counts steps. A sequence that joins at step c with n tokens to go ends at step
c + n; between two events the batch is constant, so the clock runs evenly.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from mooncake_conductor.policy.kernels import F64, I64
from mooncake_conductor.simulator.compiling import compiled
from mooncake_conductor.simulator.model import CostModel, step_s

__all__ = ["Decoders", "advance", "join", "lightest", "make_decoders"]


class Decoders(NamedTuple):
    """State of all decode instances.

    Attributes:
        steps: float64 [instances]: the clock of each.
        now_s: float64 [instances]: when it was last looked at.
        tokens: float64 [instances]: KV cache of its batch.
        batch: int64 [instances]: sequences.
        ends: for each instance a heap of (step at which it ends, request, tokens that it then has).
        left_s: float64 [requests]: when each request's last token came.
        worst_step_s: float64 [requests]: its longest step.
    """

    steps: F64
    now_s: F64
    tokens: F64
    batch: I64
    ends: list[list[tuple[float, int, float]]]
    left_s: F64
    worst_step_s: F64


@compiled
def make_decoders(instances: int, requests: int) -> Decoders:
    """Idle ones."""
    # An element that ends never, so that the compiler knows what is in the lists.
    ends = [[(np.inf, -1, 0.0)] for _ in range(instances)]
    return Decoders(
        np.zeros(instances),
        np.zeros(instances),
        np.zeros(instances),
        np.zeros(instances, np.int64),
        ends,
        np.zeros(requests),
        np.zeros(requests),
    )


@compiled
def advance(model: CostModel, decoders: Decoders, i: int, until_s: float) -> None:
    """Let an instance run until then: what ends meanwhile leaves."""
    heap = decoders.ends[i]
    while heap[0][1] >= 0:
        pace_s = step_s(model, decoders.tokens[i])
        end, request, tokens = heap[0]
        at_s = decoders.now_s[i] + (end - decoders.steps[i]) * pace_s
        if at_s > until_s:
            decoders.steps[i] += (until_s - decoders.now_s[i]) / pace_s
            break
        heapq.heappop(heap)
        decoders.steps[i], decoders.now_s[i] = end, at_s
        decoders.tokens[i] -= tokens
        decoders.batch[i] -= 1
        decoders.left_s[request] = at_s
    decoders.now_s[i] = until_s


@compiled
def join(
    model: CostModel, decoders: Decoders, i: int, request: int, prompt: int, output: int, now_s: float
) -> float:
    """A sequence begins to decode; how long a step takes from now on. The instance was advanced until now.

    Its KV cache counts with half of what it will write, the mean over its time.
    """
    if decoders.batch[i] == 0:
        decoders.tokens[i] = 0.0  # without what rounding has left
    tokens = prompt + output / 2.0
    decoders.tokens[i] += tokens
    decoders.batch[i] += 1
    heapq.heappush(decoders.ends[i], (decoders.steps[i] + output, request, tokens))
    pace_s = step_s(model, decoders.tokens[i])
    decoders.worst_step_s[request] = pace_s
    return pace_s


@compiled
def lightest(decoders: Decoders) -> int:
    """The instance with the least KV cache, which has the shortest steps."""
    return int(np.argmin(decoders.tokens))
