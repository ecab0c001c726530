"""Draws results as a picture; needs matplotlib (``pip install mooncake-transfer[bench]``)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.bench.measurement import Result
from mooncake_transfer.bench.plan import shown_size

__all__ = ["SUFFIXES", "plot_results", "require_plotting"]

SUFFIXES = (".png", ".svg")


def require_plotting(file: Path) -> None:
    """Check, before anything is measured, that ``file`` can be drawn. Raises ConfigError."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"cannot plot to {file}: its name must end in {' or '.join(SUFFIXES)}")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"cannot plot to {file}: {error}; pip install mooncake-transfer[bench]") from None


def plot_results(results: Sequence[Result], file: Path) -> None:
    """Draw rate and median latency over the block size, a line for each combination of the rest."""
    require_plotting(file)
    # The object interface: no window system, no global state.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 5), layout="constrained")
    rate, latency = figure.subplots(1, 2)
    lines: dict[str, list[Result]] = {}
    for result in results:
        point = result.point
        name = f"{point.driver} {point.op}"
        name += f", {point.batch} blocks" if point.batch > 1 else ""
        name += f", {point.threads} threads" if point.threads > 1 else ""
        lines.setdefault(name, []).append(result)
    for name, found in lines.items():
        ordered = sorted(found, key=lambda result: result.point.size)
        sizes = [result.point.size for result in ordered]
        rate.plot(sizes, [result.gb_per_s for result in ordered], marker="o", label=name)
        latency.plot(sizes, [result.p50_us for result in ordered], marker="o", label=name)
    every_size = sorted({result.point.size for result in results})
    for axes, label in ((rate, "GB/s"), (latency, "p50, us")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(every_size, labels=[shown_size(size) for size in every_size])
        axes.set_xlabel("block size")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
    latency.set_yscale("log")
    rate.legend(loc="upper left")  # finding the best place takes long, of which it warns
    figure.savefig(file)
