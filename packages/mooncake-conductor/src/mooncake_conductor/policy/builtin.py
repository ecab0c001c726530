"""The plugin that offers this package's own policies, the same way a third party's would."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_conductor.hooks import hookimpl
from mooncake_conductor.policy.arrays import LIVE, KernelPolicy
from mooncake_conductor.policy.cache_aware import CacheAware
from mooncake_conductor.policy.round_robin import RoundRobin
from mooncake_conductor.policy.snapshot import Policy

__all__ = ["mooncake_conductor_policies"]


@hookimpl
def mooncake_conductor_policies() -> Sequence[Policy]:
    """The policies of this package."""
    return [CacheAware(), RoundRobin(), *(KernelPolicy(name) for name in LIVE)]
