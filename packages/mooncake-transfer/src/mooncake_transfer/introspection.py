"""What a running engine tells about itself: to ``mooncake top``, to metrics, and to any peer that asks."""

from __future__ import annotations

import os
import socket
import time
import weakref
from typing import TYPE_CHECKING

import msgspec

from mooncake_transfer._errors import EngineClosed, PeerIncompatible
from mooncake_transfer.peer import Caller
from mooncake_transfer.rails import RailStatus

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine

__all__ = [
    "STATS_METHOD",
    "RailRate",
    "Snapshot",
    "SnapshotServer",
    "ask_snapshot",
    "latency_quantile_us",
    "rail_rates",
    "take_snapshot",
]

STATS_METHOD = "mooncake.stats"


class Snapshot(msgspec.Struct, frozen=True):
    """One engine at one moment. Holds nothing secret: no key, no bytes.

    Attributes:
        address: the engine's channel address.
        epoch: its incarnation.
        host: name of its machine.
        pid: its process.
        taken_s: seconds of that machine's monotonic clock: differences between two snapshots are times.
        regions: how many regions it has registered.
        region_bytes: their size in all.
        drivers: counters of each driver, as ``TransferEngine.stats()`` gives them.
        rails: every rail to every peer it reached, as ``TransferEngine.rails()`` gives them.
    """

    address: str
    epoch: int
    host: str
    pid: int
    taken_s: float
    regions: int
    region_bytes: int
    drivers: dict[str, dict[str, int]]
    rails: list[RailStatus]


class RailRate(msgspec.Struct, frozen=True):
    """What a rail did between two snapshots.

    Attributes:
        rail: as it stands at the end.
        bytes_per_s: moved per second.
        ops_per_s: slices per second.
        p50_us: half of the slices took at most so many microseconds (a power of two); None without slices.
        p99_us: the same for 99 of 100.
        errors: slices that failed.
    """

    rail: RailStatus
    bytes_per_s: float
    ops_per_s: float
    p50_us: float | None
    p99_us: float | None
    errors: int


def take_snapshot(engine: TransferEngine) -> Snapshot:
    """Describe an engine of this process. Raises EngineClosed."""
    engine._require_open()
    with engine._lock:
        regions = [region.nbytes for region in engine._regions.values()]
    return Snapshot(
        engine.address,
        engine.epoch,
        socket.gethostname(),
        os.getpid(),
        time.monotonic(),
        len(regions),
        sum(regions),
        engine.stats(),
        engine.rails(),
    )


class SnapshotServer:
    """Handler of STATS_METHOD. Does not keep the engine alive."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, _: bytes, __: Caller) -> bytes:
        """Answer with a snapshot."""
        engine = self._engine()
        if engine is None:
            raise EngineClosed("the engine has been closed")
        return msgspec.msgpack.encode(take_snapshot(engine))


def ask_snapshot(engine: TransferEngine, address: str, timeout_s: float) -> Snapshot:
    """Have the engine at ``address`` describe itself, asking from ``engine``.

    Raises PeerUnreachable, RemoteError, PeerIncompatible when the answer makes no sense.
    """
    answer = engine.connect(address, timeout_s=timeout_s).call(STATS_METHOD, timeout_s=timeout_s)
    try:
        return msgspec.msgpack.decode(answer, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise PeerIncompatible(f"what {address} says of itself is of another version: {error}") from None


def rail_rates(before: Snapshot | None, after: Snapshot) -> list[RailRate]:
    """What each rail did between two snapshots of one engine; without a first one, since the rail was made.

    A snapshot of another incarnation counts as none. Without a first one the rates are 0: nobody knows since
    when the rail has been there.
    """
    earlier: dict[tuple[str, ...], RailStatus] = {}
    elapsed_s = 0.0
    if before is not None and before.epoch == after.epoch:
        earlier = {_identity(rail): rail for rail in before.rails}
        elapsed_s = after.taken_s - before.taken_s
    return [_rate(earlier.get(_identity(rail)), rail, elapsed_s) for rail in after.rails]


def _identity(rail: RailStatus) -> tuple[str, ...]:
    return rail.peer, rail.driver, rail.device, rail.remote_device


def _rate(before: RailStatus | None, after: RailStatus, elapsed_s: float) -> RailRate:
    moved, ops, errors, buckets = after.bytes, after.ops, after.errors, list(after.latency_buckets)
    # A peer that was restarted has a new rail under the old name: its counters start anew.
    if before is not None and before.ops <= after.ops and before.bytes <= after.bytes:
        moved, ops, errors = moved - before.bytes, ops - before.ops, errors - before.errors
        buckets = [now - then for now, then in zip(buckets, before.latency_buckets, strict=True)]
    return RailRate(
        after,
        moved / elapsed_s if elapsed_s > 0 else 0.0,
        ops / elapsed_s if elapsed_s > 0 else 0.0,
        latency_quantile_us(buckets, 0.5),
        latency_quantile_us(buckets, 0.99),
        errors,
    )


def latency_quantile_us(buckets: list[int], quantile: float) -> float | None:
    """Upper bound in microseconds of the bucket that a quantile of slices falls into; None without any."""
    total, seen = sum(buckets), 0
    for index, count in enumerate(buckets):
        seen += count
        if count and seen >= quantile * total:
            return float(2**index)
    return None
