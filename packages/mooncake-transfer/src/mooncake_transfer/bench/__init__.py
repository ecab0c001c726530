"""Measures the engine on a user's own machines: the parts behind ``mooncake bench``."""

from mooncake_transfer.bench.measurement import Result, measure, verify
from mooncake_transfer.bench.plan import Plan, Point, parse_counts, parse_size, parse_sizes, shown_size
from mooncake_transfer.bench.target import BenchTarget, LocalTarget, request_region

__all__ = [
    "BenchTarget",
    "LocalTarget",
    "Plan",
    "Point",
    "Result",
    "measure",
    "parse_counts",
    "parse_size",
    "parse_sizes",
    "request_region",
    "shown_size",
    "verify",
]
