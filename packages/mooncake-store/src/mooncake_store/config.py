"""Configuration of stores and masters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from mooncake_store._errors import ConfigError
from mooncake_store.policy import TenantPolicy
from mooncake_store.tiers.config import TierConfig

__all__ = ["MAX_EXTENTS", "MAX_KEY_BYTES", "StoreConfig", "read_token"]

# An object may be cut into this many pieces: it lifts the worst fill of the segments from 67 to 96 % when
# object sizes change (measured on model-swap and log-uniform mixes), and further pieces gain nothing.
MAX_EXTENTS = 4
MAX_KEY_BYTES = 64 << 10

_POSITIVE = (
    "lease_ttl_s",
    "reservation_ttl_s",
    "client_ttl_s",
    "leader_ttl_s",
    "heartbeat_s",
    "reconnect_max_s",
    "connect_timeout_s",
    "call_timeout_s",
    "transfer_timeout_s",
    "tier_write_timeout_s",
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
        eviction: master: policy by which objects leave: clock, lru, arc, gdsf, or one of a plugin.
        evict_reserve_fraction: master: part of the capacity that is freed in advance once room has to be
            made.
        recovery: master: another master may take over what this one's owners hold; room of what has gone is
            then used again only after its owner has confirmed that it knows.
        tenants: master: what tenants may do, by name; others may do anything.
        max_unread_notices: master: an owner that leaves more records unread is taken for dead.
        leader_ttl_s: master of a cluster: another one leads when the leader has not been able to say for this
            long that it lives.
        heartbeat_s: client: how often leases are renewed and the master is looked after, at most.
        reconnect_max_s: client: longest pause between two attempts to come back to a lost master.
        connect_timeout_s: client: how long reaching the master may take.
        call_timeout_s: client: how long an answer of the master may take.
        transfer_timeout_s: client: how long moving the bytes of a read or a write may take, and a second more
            for every 32 MiB. What a segment's owner does not give by then is a miss, or is read from another
            replica; what it does not take is written to another segment. Where there are others, half of the
            time left is theirs. The default outlasts a packet that TCP loses five times in a row (6.2 s) and
            ends before the master has given up an owner that is silent.
        put_wait_s: client: how long a put waits for objects that are being read to become evictable.
        notice_wait_s: client: how long a put waits, at its end, for ``on_evicted`` handlers to take earlier
            evictions.
        numa_node: client: the NUMA node whose memory is lent; None takes what comes.
        lend_from: client: the driver whose memory is lent, such as ``cxl``; None: what the engine allocates
            from.
        staging_bytes: client: size of the buffers through which ``put`` and ``get`` reach other processes'
            segments.
        checksums: client: values get checksums (xxh3), which who reads them over a network compares.
        access_file: master: who may act for which tenant, see ``mooncake_store.access.rules``; empty:
            everybody for any.
        token_file: client: file with the token that it shows the master; empty: it shows none.
        tiers: client: where values of its segment are kept beyond memory.
        tier_admission: client: which values go there: those that were read after they were put, or all.
        tier_staging_bytes: client: memory in which values of its tiers lie while others read them.
        tier_write_timeout_s: client: how long writing a batch of values to a tier may take.
    """

    tenant: str = ""
    lease_ttl_s: float = 10.0
    reservation_ttl_s: float = 30.0
    client_ttl_s: float = 30.0
    granule_bytes: int = 4096
    eviction: str = "clock"
    evict_reserve_fraction: float = 0.01
    recovery: bool = False
    tenants: dict[str, TenantPolicy] = {}
    max_unread_notices: int = 1_000_000
    leader_ttl_s: float = 5.0
    heartbeat_s: float = 1.0
    reconnect_max_s: float = 1.0
    connect_timeout_s: float = 3.0
    call_timeout_s: float = 5.0
    transfer_timeout_s: float = 10.0
    put_wait_s: float = 2.0
    notice_wait_s: float = 1.0
    numa_node: int | None = None
    lend_from: str | None = None
    staging_bytes: int = 4 << 20
    tiers: tuple[TierConfig, ...] = ()
    tier_admission: Literal["second touch", "all"] = "second touch"
    tier_staging_bytes: int = 64 << 20
    tier_write_timeout_s: float = 30.0
    checksums: bool = True
    access_file: str = ""
    token_file: str = ""

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
        if min(self.max_unread_notices, self.staging_bytes, self.tier_staging_bytes) < 1:
            raise ConfigError("max_unread_notices, staging_bytes and tier_staging_bytes must be at least 1")


def read_token(file: str | Path | None) -> str:
    """The token in a file; empty without one. Raises ConfigError."""
    if not file:
        return ""
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"the token file {file} is empty")
    return token
