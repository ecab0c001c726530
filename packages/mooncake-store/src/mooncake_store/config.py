"""Configuration of stores and masters."""

from __future__ import annotations

import msgspec

from mooncake_store._errors import ConfigError

__all__ = ["MAX_EXTENTS", "MAX_KEY_BYTES", "StoreConfig"]

# An object may be cut into this many pieces: it lifts the worst fill of the segments from 67 to 96 % when
# object sizes change (measured on model-swap and log-uniform mixes), and further pieces gain nothing.
MAX_EXTENTS = 4
MAX_KEY_BYTES = 64 << 10

_POSITIVE = (
    "lease_ttl_s",
    "reservation_ttl_s",
    "client_ttl_s",
    "heartbeat_s",
    "reconnect_max_s",
    "connect_timeout_s",
    "call_timeout_s",
)


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one store client or master; each reads what concerns it. Raises ConfigError for bad values.

    Attributes:
        tenant: namespace of a client's keys; the same key of two tenants is two objects.
        lease_ttl_s: master: how long bytes stay put for a reader that shows no sign of life. Living readers
            renew.
        reservation_ttl_s: master: how long a put may take from its reservation to its commit.
        client_ttl_s: master: a client that has not been heard of for this long is taken for dead.
        granule_bytes: master: unit of allocation; a power of two.
        evict_reserve_fraction: master: part of the capacity that is freed in advance once room has to be
            made.
        max_unread_notices: master: an owner that leaves more evictions unread is taken for dead.
        heartbeat_s: client: how often leases are renewed and the master is looked after, at most.
        reconnect_max_s: client: longest pause between two attempts to come back to a lost master.
        connect_timeout_s: client: how long reaching the master may take.
        call_timeout_s: client: how long an answer of the master may take.
        put_wait_s: client: how long a put waits for objects that are being read to become evictable.
        notice_wait_s: client: how long a put waits, at its end, for ``on_evicted`` handlers to take earlier
            evictions.
        staging_bytes: client: size of the buffers through which ``put`` and ``get`` reach other processes'
            segments.
    """

    tenant: str = ""
    lease_ttl_s: float = 10.0
    reservation_ttl_s: float = 30.0
    client_ttl_s: float = 30.0
    granule_bytes: int = 4096
    evict_reserve_fraction: float = 0.01
    max_unread_notices: int = 1_000_000
    heartbeat_s: float = 1.0
    reconnect_max_s: float = 1.0
    connect_timeout_s: float = 3.0
    call_timeout_s: float = 5.0
    put_wait_s: float = 2.0
    notice_wait_s: float = 1.0
    staging_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds")
        for name in ("put_wait_s", "notice_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more seconds")
        if self.granule_bytes < 1 or self.granule_bytes & (self.granule_bytes - 1):
            raise ConfigError(f"granule_bytes is {self.granule_bytes}; it must be a power of two")
        if not 0 <= self.evict_reserve_fraction <= 0.5:
            raise ConfigError(
                f"evict_reserve_fraction is {self.evict_reserve_fraction}; it must be between 0 and 0.5"
            )
        if self.max_unread_notices < 1 or self.staging_bytes < 1:
            raise ConfigError("max_unread_notices and staging_bytes must be at least 1")
