"""A cluster serves a trace: discrete events at prefill instances, with caches and NICs, and at decode."""

from __future__ import annotations

import heapq
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mooncake_conductor.policy.kernels import F64, I64, View, draw, fetch_of, kernel_of
from mooncake_conductor.simulator.caches import Caches, make_caches, match, store
from mooncake_conductor.simulator.compiling import compiled
from mooncake_conductor.simulator.decode import Decoders, advance, join, lightest, make_decoders
from mooncake_conductor.simulator.model import LLAMA_70B_A800, CostModel, kv_bytes, prefill_s, transfer_s
from mooncake_conductor.simulator.traces import Trace

__all__ = ["ClusterShape", "Outcome", "simulate"]


@dataclass(frozen=True)
class ClusterShape:
    """What is simulated.

    Attributes:
        prefill, decode: instances of each kind.
        cache_tokens: of the cache of each prefill instance.
        shared_cache: blocks are stored once in a cache of all instances, which all read at no cost: the
            bound of a global cache.
        model: what things cost.
        ttft_slo_s: with ``admits``, requests whose first token is predicted later are rejected at arrival.
        admits: reject at arrival.
    """

    prefill: int = 8
    decode: int = 8
    cache_tokens: float = 3e6
    shared_cache: bool = False
    model: CostModel = LLAMA_70B_A800
    ttft_slo_s: float = 30.0
    admits: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of each request.

    Attributes:
        ttft_s: float64 [requests]: until its first token; NaN where it was rejected.
        tbt_s: float64 [requests]: mean time between its tokens; NaN where it was rejected or had one.
        worst_tbt_s: float64 [requests]: longest step of its decode.
        reused: int64 [requests]: tokens of its prompt that were not computed.
        prefill_s: float64 [requests]: that it took an instance to compute it.
        instance: int64 [requests]: which did; -1 where it was rejected.
        replicas: int64 [blocks]: instances that have each block at the end.
    """

    ttft_s: F64
    tbt_s: F64
    worst_tbt_s: F64
    reused: I64
    prefill_s: F64
    instance: I64
    replicas: I64

    @property
    def mean_ttft_s(self) -> float:
        """Of the requests that were served."""
        return float(np.nanmean(self.ttft_s))

    def hit_rate(self, trace: Trace) -> float:
        """Share of all prompt tokens that were reused."""
        return float(self.reused.sum() / trace.prompt.sum())

    def within(self, ttft_s: float, tbt_s: float) -> float:
        """Share of all requests whose times were no longer than these; a rejected one's were."""
        timely = np.nan_to_num(self.ttft_s, nan=np.inf) <= ttft_s
        return float(np.mean(timely & (np.nan_to_num(self.tbt_s, nan=0.0) <= tbt_s)))


class _Requests(NamedTuple):
    arrival_s: F64
    prompt: I64
    output: I64
    blocks: I64
    first: I64
    block_tokens: int


class _Results(NamedTuple):
    ttft_s: F64
    reused: I64
    prefill_s: F64
    instance: I64
    done_s: F64


def simulate(trace: Trace, policy: str, shape: ClusterShape | None = None, seed: int = 0) -> Outcome:
    """Have a cluster serve a trace with one of the policies of ``policy.kernels``.

    The same arguments give the same outcome. Raises KeyError for another policy.
    """
    shape = shape or ClusterShape()
    instances = 1 if shape.shared_cache else shape.prefill
    capacity = int(shape.cache_tokens // trace.block_tokens)
    caches = make_caches(instances, trace.kinds, capacity * (shape.prefill if shape.shared_cache else 1))
    count = len(trace)
    results = _Results(
        np.full(count, np.nan),
        np.zeros(count, np.int64),
        np.zeros(count),
        np.full(count, -1, np.int64),
        np.zeros(count),
    )
    requests = _Requests(
        trace.arrival_s, trace.prompt, trace.output, trace.blocks, trace.first, trace.block_tokens
    )
    decoders: Decoders = _engine_of(policy)(
        shape.model,
        requests,
        caches,
        results,
        shape.prefill,
        shape.decode,
        shape.ttft_slo_s if shape.admits else np.inf,
        seed,
    )
    served = results.instance >= 0
    decoded = served & (trace.output > 1)
    tbt_s = np.full(count, np.nan)
    tbt_s[decoded] = (decoders.left_s - results.done_s)[decoded] / (trace.output[decoded] - 1)
    worst_s = np.where(decoded, decoders.worst_step_s, np.nan)
    replicas = np.unpackbits(caches.holders.view(np.uint8)).reshape(-1, 64).sum(axis=1, dtype=np.int64)
    return Outcome(
        results.ttft_s, tbt_s, worst_s, results.reused, results.prefill_s, results.instance, replicas
    )


@cache
def _engine_of(policy: str) -> Callable[..., Any]:
    """The simulation with this policy compiled in: a copy of ``_serve`` that calls its functions."""
    own = {
        "_choose": compiled(kernel_of(policy), keep=False),
        "_fetches": compiled(fetch_of(policy), keep=False),
    }
    names = {**_serve.__globals__, **own}
    copied = types.FunctionType(_serve.__code__, names, f"serve_{policy}")
    return compiled(copied, keep=False)


_draw = compiled(draw)


# What _engine_of puts a policy in place of.
def _choose(view: View) -> int:
    raise NotImplementedError


def _fetches(view: View, i: int) -> bool:
    raise NotImplementedError


@compiled
def _estimate(
    model: CostModel, prompt: int, block_tokens: int, caches: Caches, held: I64, matched: I64
) -> int:
    """Tokens matched at each instance, from blocks; the best. The last token is always computed."""
    best = 0
    for i in range(len(matched)):
        of = held[i if len(held) == len(matched) else 0]
        matched[i] = min(of * block_tokens, prompt - 1)
        best = max(best, matched[i])
    return best


def _serve(
    model: CostModel,
    requests: _Requests,
    caches: Caches,
    results: _Results,
    instances: int,
    decoders_count: int,
    ttft_slo_s: float,
    seed: int,
) -> Decoders:
    count = len(requests.prompt)
    decoders = make_decoders(decoders_count, count)
    held = np.zeros(len(caches.used), np.int64)
    matched, queued = np.zeros(instances, np.int64), np.zeros(instances, np.int64)
    waiting = np.zeros(instances, np.int64)
    free_s, nic_free_s = np.zeros(instances), np.zeros(instances)
    queue_s, compute_s = np.zeros(instances), np.zeros(instances)
    fetch_s, busy_fetch_s = np.zeros(instances), np.zeros(instances)
    done = [(np.inf, -1, -1, 0)]  # of prefills: when, which request, where, tokens computed
    for number in range(count):
        now_s, prompt = requests.arrival_s[number], requests.prompt[number]
        while done[0][0] <= now_s:
            _finish(model, requests, results, decoders, done, waiting, queued)
        blocks = requests.blocks[requests.first[number] : requests.first[number + 1]]
        match(caches, blocks, held)
        best = _estimate(model, prompt, requests.block_tokens, caches, held, matched)
        source = int(np.argmax(matched))
        sends_s = max(0.0, nic_free_s[source] - now_s)
        for i in range(instances):
            queue_s[i] = max(0.0, free_s[i] - now_s)
            compute_s[i] = prefill_s(model, prompt, matched[i])
            fetch_s[i] = transfer_s(model, best - matched[i])
            busy_fetch_s[i] = sends_s + fetch_s[i] if best > matched[i] else 0.0
        fetched_compute_s = prefill_s(model, prompt, best)
        view = View(
            prompt,
            queue_s,
            queued,
            waiting,
            matched,
            best,
            compute_s,
            fetch_s,
            busy_fetch_s,
            fetched_compute_s,
            number,
            (_draw(seed * count + number, 0), _draw(seed * count + number, 1)),
        )
        i = _choose(view)
        reused, begins_s, takes_s = matched[i], queue_s[i], compute_s[i]
        fetched = best > matched[i] and _fetches(view, i)
        if fetched:
            reused, takes_s = best, fetched_compute_s
            begins_s = max(queue_s[i], busy_fetch_s[i])
        # What is computed leaves layer by layer meanwhile; where the network is slower, it is waited for.
        takes_s = max(takes_s, kv_bytes(model, prompt) / model.network_bytes_s if decoders_count else 0.0)
        if begins_s + takes_s > ttft_slo_s:
            continue
        if fetched:
            nic_free_s[source] = now_s + busy_fetch_s[i]
        free_s[i] = now_s + begins_s + takes_s
        waiting[i] += 1
        queued[i] += prompt - reused
        results.reused[number], results.prefill_s[number] = reused, takes_s
        results.instance[number] = i
        results.ttft_s[number] = begins_s + takes_s
        results.done_s[number] = free_s[i]
        heapq.heappush(done, (free_s[i], number, i, prompt - reused))
        store(caches, min(i, len(caches.used) - 1), blocks)
    while done[0][1] >= 0:
        _finish(model, requests, results, decoders, done, waiting, queued)
    for i in range(decoders_count):
        advance(model, decoders, i, np.inf)
    return decoders


@compiled
def _finish(
    model: CostModel,
    requests: _Requests,
    results: _Results,
    decoders: Decoders,
    done: list[tuple[float, int, int, int]],
    waiting: I64,
    queued: I64,
) -> None:
    """The next prefill ends, and its request decodes."""
    now_s, number, i, computed = heapq.heappop(done)
    waiting[i] -= 1
    queued[i] -= computed
    if len(decoders.batch) == 0 or requests.output[number] < 2:
        return
    for one in range(len(decoders.batch)):
        advance(model, decoders, one, now_s)
    join(
        model,
        decoders,
        lightest(decoders),
        number,
        requests.prompt[number],
        requests.output[number] - 1,
        now_s,
    )
