"""What the engine knows of its ways to peers."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["RailStatus"]


class RailStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rail: a device of this engine paired with one of a peer's, of the same driver.

    Attributes:
        peer: channel address of the peer.
        driver: the driver that moves the bytes.
        device: the local device or address; empty when the driver has only one.
        remote_device: the peer's.
        state: the breaker: ``closed`` (in use), ``suspect`` (others are preferred for a moment), ``open``
            (paused after several errors) or ``half-open`` (the pause is over, the next slice is a trial).
        bytes: moved, over the life of the rail.
        ops: slices that succeeded.
        errors: slices that failed.
        retries: slices that failed here and were tried again, here or elsewhere.
        bandwidth_bytes_per_s: moving average; what the driver declares until something was measured.
        in_flight_bytes: with the driver now.
        latency_buckets: successful slices by time: bucket i counts those under 2^i microseconds that no lower
            bucket counts; the last one has the rest.
        last_error: the driver's last reason; empty when it never failed.
    """

    peer: str
    driver: str
    device: str
    remote_device: str
    state: Literal["closed", "suspect", "open", "half-open"]
    bytes: int
    ops: int
    errors: int
    retries: int
    bandwidth_bytes_per_s: float
    in_flight_bytes: int
    latency_buckets: list[int]
    last_error: str
