"""What a driver cannot do, so that the suite does not ask it to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Quirks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """How a driver differs from one that does everything. The defaults ask for the most but order.

    Attributes:
        ordered: blocks of one transfer become visible in their order.
        max_slice_bytes: most bytes of one operation, as its caps say; None: no limit. The engine cuts longer
            blocks. Sizes around it are tested.
        alignment: offsets and lengths must be multiples of it.
        same_host_only: peers are on this machine; the suite then uses no network address.
        same_process_only: peers are in this process; the suite then starts no other.
        target_kind: what regions of peers are made of: ``engine`` (its memory), or ``file`` for drivers
            that reach files and no memory of peers, or ``module:function`` for memory of a device.
        scoped_keys: it has the functions grant and revoke of ABI 1.1.
        own_memory_only: peers reach only memory that the driver allocated (``DriverInfo.allocate``); memory
            that the user brings can be the local side of a transfer.
        notices: it has the functions notify and poll_notices of ABI 1.2.
    """

    ordered: bool = False
    max_slice_bytes: int | None = None
    alignment: int = 1
    same_host_only: bool = False
    same_process_only: bool = False
    scoped_keys: bool = True
    target_kind: str = "engine"
    own_memory_only: bool = False
    notices: bool = False
