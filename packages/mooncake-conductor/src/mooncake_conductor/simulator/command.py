"""What ``mooncake simulate`` does: simulate, show a table, write JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from mooncake_conductor._errors import ConfigError
from mooncake_conductor.policy.kernels import KERNELS
from mooncake_conductor.simulator.caches import MOST_INSTANCES
from mooncake_conductor.simulator.cluster import ClusterShape, simulate
from mooncake_conductor.simulator.figures import FIGURES
from mooncake_conductor.simulator.traces import Trace, read_mooncake

__all__ = ["Asked", "run"]

NAMES = tuple(name for name, _ in KERNELS)
MOST_SEEDS = 10_000


class Asked(NamedTuple):
    """The options of the command. ``figure`` None: policies, all when none is named."""

    trace: Path
    figure: int | None
    policies: tuple[str, ...]
    prefill: int
    decode: int
    cache_tokens: float
    speed: float
    seeds: int
    json_file: Path | None


def run(asked: Asked, console: Console) -> None:
    """Simulate. Raises ConfigError and TraceUnreadable."""
    _check(asked)
    trace = read_mooncake(asked.trace)
    if asked.figure is not None:
        found: Any = {
            "figure": asked.figure,
            "trace": asked.trace.name,
            **FIGURES[asked.figure](trace, asked.seeds),
        }
        console.print_json(msgspec.json.encode(found).decode())
    else:
        found = [_of_policy(name, trace.faster(asked.speed), asked) for name in asked.policies or NAMES]
        console.print(_table(found))
    if asked.json_file is not None:
        try:
            asked.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        except OSError as error:
            raise ConfigError(f"--json {asked.json_file} cannot be written: {error.strerror}") from error


def _check(asked: Asked) -> None:
    if asked.figure is not None and asked.figure not in FIGURES:
        raise ConfigError(
            f"figure {asked.figure} cannot be simulated; these can: {', '.join(map(str, FIGURES))}"
        )
    unknown = [name for name in asked.policies if name not in NAMES]
    if unknown:
        raise ConfigError(f"there is no policy {unknown[0]!r}; simulated are {', '.join(NAMES)}")
    for name, value, most in (
        ("--prefill", asked.prefill, MOST_INSTANCES),
        ("--seeds", asked.seeds, MOST_SEEDS),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{name} is {value}; it must be from 1 to {most}")
    if asked.decode < 0:
        raise ConfigError(f"--decode is {asked.decode}; it must be 0 or more")
    for name, number in (("--cache-tokens", asked.cache_tokens), ("--speed", asked.speed)):
        if not (number > 0 and math.isfinite(number)):
            raise ConfigError(f"{name} is {number}; it must be positive")


def _of_policy(name: str, trace: Trace, asked: Asked) -> dict[str, Any]:
    shape = ClusterShape(prefill=asked.prefill, decode=asked.decode, cache_tokens=asked.cache_tokens)
    runs = [simulate(trace, name, shape, seed) for seed in range(asked.seeds)]
    ttft_s = np.concatenate([one.ttft_s for one in runs])
    tbt_s = np.concatenate([one.tbt_s for one in runs])
    decoded = not np.isnan(tbt_s).all()
    return {
        "policy": name,
        "mean_ttft_s": float(ttft_s.mean()),
        "p50_ttft_s": float(np.percentile(ttft_s, 50)),
        "p99_ttft_s": float(np.percentile(ttft_s, 99)),
        "within_30_s": float(np.mean(ttft_s <= 30.0)),
        "mean_tbt_s": float(np.nanmean(tbt_s)) if decoded else None,
        "hit_rate": float(np.mean([one.hit_rate(trace) for one in runs])),
        "prefill_s": float(np.mean([one.prefill_s.sum() for one in runs])),
        "seeds": asked.seeds,
    }


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(title="simulated", title_justify="left")
    table.add_column("policy", no_wrap=True)
    columns = {
        "mean_ttft_s": "mean TTFT s",
        "p50_ttft_s": "p50",
        "p99_ttft_s": "p99",
        "within_30_s": "within 30 s",
        "mean_tbt_s": "mean TBT s",
        "hit_rate": "hit rate",
        "prefill_s": "prefill s",
    }
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in found:
        table.add_row(row["policy"], *("" if row[name] is None else f"{row[name]:.4g}" for name in columns))
    return table
