"""Placement policies: pure functions from a snapshot of the cluster to the workers that serve a request."""

from mooncake_conductor.policy.cache_aware import CacheAware
from mooncake_conductor.policy.round_robin import RoundRobin
from mooncake_conductor.policy.snapshot import Candidate, Placement, Policy, Snapshot

__all__ = ["CacheAware", "Candidate", "Placement", "Policy", "RoundRobin", "Snapshot"]
