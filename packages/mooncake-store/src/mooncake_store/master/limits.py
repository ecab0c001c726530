"""How often tenants may ask."""

from __future__ import annotations

from mooncake_store import protocol
from mooncake_store.config import StoreConfig
from mooncake_store.keys import DIGEST_BYTES
from mooncake_store.master.members import Member
from mooncake_store.protocol import Request

__all__ = ["Limits"]

BURST_S = 1.0  # what may be asked for at once, after a pause, in seconds of the rate


class Limits:
    """A bucket of tokens for each tenant with a rate. Not thread-safe."""

    def __init__(self, config: StoreConfig) -> None:
        self._rates = {
            name: limits.keys_per_s
            for name, limits in config.tenants.items()
            if limits.keys_per_s is not None
        }
        self._left = {name: (rate * BURST_S, 0.0) for name, rate in self._rates.items()}  # tokens, at

    def refuse(self, request: Request, member: Member, now_s: float) -> float | None:
        """Take a token for each key of the request; or how many seconds are missing until it may be sent.

        A batch is let through when there is any token: it may be larger than a full bucket.
        """
        rate = self._rates.get(member.tenant_name)
        if rate is None or not isinstance(
            request, protocol.Reserve | protocol.Locate | protocol.Exist | protocol.Remove
        ):
            return None
        tokens, at_s = self._left[member.tenant_name]
        tokens = min(rate * BURST_S, tokens + rate * (now_s - at_s))
        keys = len(request.digests) // DIGEST_BYTES
        refused = tokens <= 0 and keys > 0
        self._left[member.tenant_name] = (tokens if refused else tokens - keys, now_s)
        # A little more than it takes to bring the bucket above nothing.
        return -tokens / rate + min(1.0 / rate, BURST_S) if refused else None
