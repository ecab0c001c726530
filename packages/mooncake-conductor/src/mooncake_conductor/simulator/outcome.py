"""What is simulated, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake_conductor.policy.kernels import F64, I64
from mooncake_conductor.simulator.model import LLAMA_70B_A800, CostModel
from mooncake_conductor.simulator.traces import Trace

__all__ = ["ClusterShape", "Outcome"]


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
