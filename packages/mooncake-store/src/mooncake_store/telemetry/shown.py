"""A report of a store as people and pages are shown it."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_store.keys import shown_key
from mooncake_store.protocol import HotObject, SegmentReport, StoreReport
from mooncake_store.telemetry.latency import quantile_s

__all__ = ["as_json", "fragmentation", "name_of", "useful"]


def fragmentation(segment: SegmentReport) -> float:
    """Share of the free bytes that are outside of the largest hole, 0 when nothing is free."""
    return 1 - segment.largest_hole_bytes / segment.free_bytes if segment.free_bytes else 0.0


def useful(segment: SegmentReport) -> float:
    """Share of the bytes taken that values have, 1 when nothing is taken."""
    taken = segment.capacity_bytes - segment.free_bytes
    return segment.value_bytes / taken if taken else 1.0


def as_json(report: StoreReport) -> dict[str, Any]:
    """A report as JSON shows it: with names, and with what follows from the numbers."""
    stats = msgspec.structs.asdict(report.stats)
    return {
        "epoch": f"{report.epoch:016x}",
        "now_s": report.now_s,
        "stats": stats,
        "segments": [
            {
                **msgspec.structs.asdict(segment),
                "segment": f"{segment.segment:x}",
                "fragmentation": fragmentation(segment),
                "useful": useful(segment),
            }
            for segment in report.segments
        ],
        "tenants": [msgspec.structs.asdict(tenant) for tenant in report.tenants],
        "tiers": [
            {
                "tier": tier.tier,
                "open_by": ", ".join(tier.owners),
                "records": tier.records,
                "value_bytes": tier.value_bytes,
            }
            for tier in report.tiers
        ],
        "hot": [_hot(one) for one in report.hot],
        "requests": {
            name: {
                "count": latency.count,
                "failures": latency.failures,
                "total_s": latency.total_s,
                "p50_s": _finite(quantile_s(latency, 0.5)),
                "p99_s": _finite(quantile_s(latency, 0.99)),
            }
            for name, latency in sorted(report.requests.items())
        },
    }


def _hot(one: HotObject) -> dict[str, Any]:
    return {
        "digest": one.digest,
        "key": shown_key(one.key) if one.key else None,
        "key_hex": one.key.hex(),
        "reads": one.reads,
        "nbytes": one.nbytes,
    }


def name_of(one: HotObject) -> str:
    """What people are shown: the key, in hexadecimal where it is no text; else the digest."""
    return (shown_key(one.key) or f"hex {one.key.hex()}") if one.key else f"digest {one.digest}"


def _finite(seconds: float | None) -> float | None:
    return None if seconds in (None, float("inf")) else seconds
