"""How a value is to be kept: what puts say about it, and what a master says about tenants."""

from __future__ import annotations

from typing import Literal

import msgspec

from mooncake_store._errors import ConfigError

__all__ = ["MAX_PRIORITY", "MAX_REPLICAS", "MAX_STRIPES", "PutPolicy", "TenantPolicy"]

MAX_PRIORITY = 15
MAX_REPLICAS = 16
MAX_STRIPES = 4  # as a replica has so many extents at most


class PutPolicy(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the values of a put are placed and how long they stay. Raises ConfigError for bad values.

    Attributes:
        replicas: copies, each with another owner, and on another machine while there is one. As many are
            made as there are owners with room; one is enough for the put to succeed.
        preferred_segments: ids of segments (see ``Store.segment_id``) to place the first copy in, best first.
        same_node: prefer segments of the writer's machine over emptier ones of others.
        soft_pin_s: evict it, for this long, only when nothing else is left to evict.
        hard_pin: never evict it; only ``remove``, ``unpin`` or the end of its owner ends that.
        group: values of one group of a tenant are evicted together, as far as nobody reads them.
        priority: 0 to 15; values of lower priority are evicted first.
        session: values of a session of a tenant are the first to go once ``end_session`` was called.
        stripes: 1 to 4; a value of at least 2 MiB is cut into so many equal pieces, of 1 MiB or more, with as
            many owners, so that they move at the same time. With fewer where fewer have room. It is lost with
            any of them; a further replica needs owners that have none of it.
    """

    replicas: int = 1
    preferred_segments: tuple[int, ...] = ()
    same_node: bool = False
    soft_pin_s: float | None = None
    hard_pin: bool = False
    group: str = ""
    priority: int = 0
    session: str = ""
    stripes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas is {self.replicas}; it must be 1 to {MAX_REPLICAS}")
        if not 1 <= self.stripes <= MAX_STRIPES:
            raise ConfigError(f"stripes is {self.stripes}; it must be 1 to {MAX_STRIPES}")
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise ConfigError(f"priority is {self.priority}; it must be 0 to {MAX_PRIORITY}")
        if self.soft_pin_s is not None and not self.soft_pin_s > 0:
            raise ConfigError(
                f"soft_pin_s is {self.soft_pin_s}; it must be a positive number of seconds, or None"
            )
        for name in ("group", "session"):
            if len(getattr(self, name).encode()) > 1024:
                raise ConfigError(f"the name of the {name} is longer than 1024 bytes; hash it")

    def on_wire(self) -> list[object]:
        """The fields but for the last ones that are as if not given: older masters refuse new fields."""
        fields = list(msgspec.structs.astuple(self))
        while fields and fields[-1] == _DEFAULTS[len(fields) - 1]:
            fields.pop()
        return fields


_DEFAULTS = msgspec.structs.astuple(PutPolicy())


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a master lets one tenant do. Raises ConfigError for bad values.

    Attributes:
        quota_bytes: most that its values may take, in whole granules and with all replicas; None: no bound.
        eviction: what makes room once the quota is used up. ``"own"``: its own values leave for new ones.
            ``"global"``: nothing; puts beyond the quota raise QuotaExceeded.
        keys_per_s: most keys that it may put, look for, read and remove a second, on average; None: no bound.
    """

    quota_bytes: int | None = None
    eviction: Literal["own", "global"] = "global"
    keys_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("quota_bytes", "keys_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive, or None for no bound")
