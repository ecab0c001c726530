"""A cluster serves a trace: discrete events at prefill instances, with caches and NICs, and at decode."""

from __future__ import annotations

import heapq
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mooncake_conductor.policy.kernels import F64, I64, View, draw, fetch_of, kernel_of
from mooncake_conductor.simulator.caches import Caches, make_caches, match, store
from mooncake_conductor.simulator.compiling import compiled
from mooncake_conductor.simulator.decode import Decoders, advance, join, lightest, make_decoders
from mooncake_conductor.simulator.model import CostModel, kv_bytes, prefill_s, transfer_s
from mooncake_conductor.simulator.outcome import ClusterShape, Outcome
from mooncake_conductor.simulator.traces import Trace

__all__ = ["ClusterShape", "Outcome", "simulate"]


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


# Never called: _engine_of puts a policy's functions in place of these two.
def _choose(view: View) -> int:
    raise NotImplementedError


def _fetches(view: View, i: int) -> bool:
    raise NotImplementedError


@compiled
def _estimate(prompt: int, block_tokens: int, held: I64, matched: I64) -> int:
    """Tokens matched at each instance, from blocks; the best. The last token is always computed."""
    best = 0
    for i in range(len(matched)):
        of = held[i if len(held) == len(matched) else 0]
        matched[i] = min(of * block_tokens, prompt - 1)
        best = max(best, matched[i])
    return best


class _Prefill(NamedTuple):
    """Prefill instances: what they have to do, and room for what is seen of them when a request comes."""

    free_s: F64
    nic_free_s: F64
    queued: I64
    waiting: I64
    held: I64
    matched: I64
    queue_s: F64
    compute_s: F64
    fetch_s: F64
    busy_fetch_s: F64


@compiled
def _make_prefill(instances: int, caches: int) -> _Prefill:
    return _Prefill(
        np.zeros(instances),
        np.zeros(instances),
        np.zeros(instances, np.int64),
        np.zeros(instances, np.int64),
        np.zeros(caches, np.int64),
        np.zeros(instances, np.int64),
        np.zeros(instances),
        np.zeros(instances),
        np.zeros(instances),
        np.zeros(instances),
    )


@compiled
def _look(
    model: CostModel, prefill: _Prefill, now_s: float, prompt: int, best: int, turn: int, chance: int
) -> View:
    """What is known when a request comes; ``matched`` of the instances is of this request."""
    sends_s = max(0.0, prefill.nic_free_s[np.argmax(prefill.matched)] - now_s)
    for i in range(len(prefill.free_s)):
        matched = prefill.matched[i]
        prefill.queue_s[i] = max(0.0, prefill.free_s[i] - now_s)
        prefill.compute_s[i] = prefill_s(model, prompt, matched)
        prefill.fetch_s[i] = transfer_s(model, best - matched)
        prefill.busy_fetch_s[i] = sends_s + prefill.fetch_s[i] if best > matched else 0.0
    return View(
        prompt,
        prefill.queue_s,
        prefill.queued,
        prefill.waiting,
        prefill.matched,
        best,
        prefill.compute_s,
        prefill.fetch_s,
        prefill.busy_fetch_s,
        prefill_s(model, prompt, best),
        turn,
        (_draw(chance, 0), _draw(chance, 1)),
    )


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
    prefill = _make_prefill(instances, len(caches.used))
    done = [(np.inf, -1, -1, 0)]  # of prefills: when, which request, where, tokens computed
    for number in range(count):
        now_s, prompt = requests.arrival_s[number], requests.prompt[number]
        while done[0][0] <= now_s:
            _finish(model, requests, results, decoders, done, prefill)
        blocks = requests.blocks[requests.first[number] : requests.first[number + 1]]
        match(caches, blocks, prefill.held)
        best = _estimate(prompt, requests.block_tokens, prefill.held, prefill.matched)
        view = _look(model, prefill, now_s, prompt, best, number, seed * count + number)
        i = _choose(view)
        reused, begins_s, takes_s = view.matched[i], view.queue_s[i], view.compute_s[i]
        fetched = best > reused and _fetches(view, i)
        if fetched:
            reused, takes_s = best, view.fetched_compute_s
            begins_s = max(view.queue_s[i], view.busy_fetch_s[i])
        # What is computed leaves layer by layer meanwhile; where the network is slower, it is waited for.
        takes_s = max(takes_s, kv_bytes(model, prompt) / model.network_bytes_s if decoders_count else 0.0)
        if begins_s + takes_s > ttft_slo_s:
            continue
        if fetched:
            prefill.nic_free_s[np.argmax(view.matched)] = now_s + view.busy_fetch_s[i]
        prefill.free_s[i] = now_s + begins_s + takes_s
        prefill.waiting[i] += 1
        prefill.queued[i] += prompt - reused
        results.reused[number], results.prefill_s[number] = reused, takes_s
        results.instance[number], results.ttft_s[number] = i, begins_s + takes_s
        results.done_s[number] = prefill.free_s[i]
        heapq.heappush(done, (prefill.free_s[i], number, i, prompt - reused))
        # From now on, though it is computed later: who comes after it to this instance runs behind it.
        # Another may fetch it too early, by as long as this one waits.
        store(caches, min(i, len(caches.used) - 1), blocks)
    while done[0][1] >= 0:
        _finish(model, requests, results, decoders, done, prefill)
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
    prefill: _Prefill,
) -> None:
    """The next prefill ends, and its request decodes."""
    now_s, number, i, computed = heapq.heappop(done)
    prefill.waiting[i] -= 1
    prefill.queued[i] -= computed
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
