"""Placement policies on arrays: pure functions of what is known of each instance, compiled by the simulator.

It calls them for every request of a trace, the conductor for every live one. All times are seconds, all
lengths tokens. Each returns the position of the instance that is to prefill. None calls another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["F64", "I64", "KERNELS", "View", "draw", "fetch_of", "kernel_of"]

F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]

# Algorithm 1 fetches a prefix when the best one is longer than the local one by more than this factor. The
# paper adjusts it by hand and names no value; from 1 to 8 it moved the simulated mean TTFT of the
# conversation trace, 8 and 8 instances, from 1.28 to 1.30 s.
BALANCING_THRESHOLD = 2.0
# SGLang's router: share of the prompt from which the cache decides, and the imbalance of request counts from
# which it does not. Its documented defaults, from memory: not compared with its source.
SGLANG_CACHE_THRESHOLD = 0.3
SGLANG_BALANCE_ABS = 64
SGLANG_BALANCE_REL = 1.5
# vLLM production-stack's loadaware: weight of the load, relative to its mean.
LOAD_AWARE_BETA = 1.0


class View(NamedTuple):
    """What is known when a request comes; arrays have one element an instance.

    Attributes:
        prompt: tokens of its prompt.
        queue_s: until the instance could begin with it.
        queued: tokens that it has to compute before.
        requests: requests that it has and that have no first token yet.
        matched: leading tokens of the prompt in its cache.
        best: the longest of these.
        compute_s: to prefill the prompt with what is matched there.
        fetch_s: to fetch what the best has and it has not, as if nobody else used the network.
        busy_fetch_s: the same with the sender's queue.
        fetched_compute_s: to prefill the prompt with the best prefix.
        turn: how many requests came before, for policies that take turns.
        draws: two numbers of :func:`draw`, for policies that take chances.
    """

    prompt: int
    queue_s: F64
    queued: I64
    requests: I64
    matched: I64
    best: int
    compute_s: F64
    fetch_s: F64
    busy_fetch_s: F64
    fetched_compute_s: float
    turn: int
    draws: tuple[int, int]


def draw(turn: int, number: int) -> int:
    """A number below 2**31 that looks drawn: the same turn has the same one (splitmix64, its published
    constants, on 63 bits).
    """
    state = (turn * 2 + number + 1) * 0x1E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF
    state = (state ^ (state >> 30)) * 0x3F58476D1CE4E5B9 & 0x7FFFFFFFFFFFFFFF
    state = (state ^ (state >> 27)) * 0x14D049BB133111EB & 0x7FFFFFFFFFFFFFFF
    return (state ^ (state >> 31)) & 0x7FFFFFFF


def at_random(view: View) -> int:
    """Any."""
    return view.draws[0] % len(view.queue_s)


def round_robin(view: View) -> int:
    """Each in turn."""
    return view.turn % len(view.queue_s)


def least_requests(view: View) -> int:
    """The fewest requests."""
    return int(np.argmin(view.requests))


def least_tokens(view: View) -> int:
    """The fewest tokens to be computed, whatever is cached: the paper's load balancing."""
    return int(np.argmin(view.queued))


def power_of_two(view: View) -> int:
    """Of two at random the one with fewer requests."""
    count = len(view.requests)
    one = view.draws[0] % count
    other = (one + 1 + view.draws[1] % max(1, count - 1)) % count
    return one if view.requests[one] <= view.requests[other] else other


def local_cache_aware(view: View) -> int:
    """Algorithm 1 of the paper without transfers: the least estimated TTFT with what is cached there."""
    return int(np.argmin(view.queue_s + view.compute_s))


def algorithm_1(view: View) -> int:
    """Mooncake's Algorithm 1 (FAST'25): where the best prefix is much longer than the local one it is
    fetched, and the sum of transfer, queue and prefill decides.
    """
    best, least_s = 0, np.inf
    for i in range(len(view.queue_s)):
        if view.best > BALANCING_THRESHOLD * view.matched[i]:
            ttft_s = view.fetch_s[i] + view.queue_s[i] + view.fetched_compute_s
        else:
            ttft_s = view.queue_s[i] + view.compute_s[i]
        if ttft_s < least_s:
            best, least_s = i, ttft_s
    return best


def overlapped(view: View) -> int:
    """Ours: a fetch runs while the request waits, behind what the sender sends already; whichever of
    recomputing and fetching gives the first token sooner.
    """
    best, least_s = 0, np.inf
    for i in range(len(view.queue_s)):
        recomputed_s = view.queue_s[i] + view.compute_s[i]
        fetched_s = max(view.queue_s[i], view.busy_fetch_s[i]) + view.fetched_compute_s
        ttft_s = min(recomputed_s, fetched_s)
        if ttft_s < least_s:
            best, least_s = i, ttft_s
    return best


def sglang_cache_aware(view: View) -> int:
    """SGLang's router: the best match, if long enough and requests are not too unevenly spread."""
    most, least = np.max(view.requests), np.min(view.requests)
    if most - least > SGLANG_BALANCE_ABS and most > SGLANG_BALANCE_REL * least:
        return int(np.argmin(view.requests))
    if view.best > SGLANG_CACHE_THRESHOLD * view.prompt:
        return int(np.argmax(view.matched))
    return int(np.argmin(view.requests))


def dynamo_cost(view: View) -> int:
    """The prefill term of NVIDIA Dynamo's router: tokens to prefill, queue included, less the overlap.

    Its terms for decode blocks and for active requests are not there: this chooses among prefill instances.
    """
    return int(np.argmin(view.queued + view.prompt - view.matched))


def lmetric(view: View) -> int:
    """LMETRIC (arXiv 2603.15202): tokens to prefill, queue included, times the batch.

    The batch is that of prefill instances; the paper's decode in the same ones.
    """
    return int(np.argmin((view.queued + view.prompt - view.matched) * (view.requests + 1)))


def preble_e2(view: View) -> int:
    """Preble's E2: exploit the best match when more of the prompt is cached than not, else the least load."""
    if view.best >= view.prompt - view.best:
        best = -1
        for i in range(len(view.matched)):
            if view.matched[i] == view.best and (best < 0 or view.queued[i] < view.queued[best]):
                best = i
        return best
    return int(np.argmin(view.queued + view.prompt - view.matched))


def load_aware(view: View) -> int:
    """vLLM production-stack's loadaware: the matched share less the load above its mean."""
    mean = np.mean(view.requests)
    score = view.matched / view.prompt - LOAD_AWARE_BETA * (view.requests - mean) / max(1.0, mean)
    return int(np.argmax(score))


KERNELS: tuple[tuple[str, Callable[[View], int]], ...] = (
    ("random", at_random),
    ("round_robin", round_robin),
    ("least_requests", least_requests),
    ("least_tokens", least_tokens),
    ("power_of_two", power_of_two),
    ("local_cache_aware", local_cache_aware),
    ("algorithm_1", algorithm_1),
    ("overlapped", overlapped),
    ("sglang_cache_aware", sglang_cache_aware),
    ("dynamo_cost", dynamo_cost),
    ("lmetric", lmetric),
    ("preble_e2", preble_e2),
    ("load_aware", load_aware),
)


def never_fetches(view: View, i: int) -> bool:
    """Of policies that know no transfers."""
    return False


def fetches_longer(view: View, i: int) -> bool:
    """Of Algorithm 1: where the best prefix is longer than the local one by more than the threshold."""
    return bool(view.best > BALANCING_THRESHOLD * view.matched[i])


def fetches_sooner(view: View, i: int) -> bool:
    """Of ours: where the first token comes sooner so."""
    fetched_s = max(view.queue_s[i], view.busy_fetch_s[i]) + view.fetched_compute_s
    return bool(fetched_s < view.queue_s[i] + view.compute_s[i])


_FETCHING = {"algorithm_1": fetches_longer, "overlapped": fetches_sooner}


def kernel_of(name: str) -> Callable[[View], int]:
    """Which instance prefills, by the policy of this name. Raises KeyError."""
    return dict(KERNELS)[name]


def fetch_of(name: str) -> Callable[[View, int], bool]:
    """Whether that instance fetches the best prefix from who has it."""
    return _FETCHING.get(name, never_fetches)
