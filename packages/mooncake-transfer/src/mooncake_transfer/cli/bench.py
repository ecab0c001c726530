"""``mooncake bench``: how fast bytes move between this process and a target, here or on another host."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mooncake_transfer._errors import ConfigError, DriverUnavailable, NoRoute, TransferError
from mooncake_transfer.bench import (
    BenchTarget,
    LocalTarget,
    Plan,
    Point,
    Result,
    measure,
    parse_counts,
    parse_size,
    parse_sizes,
    request_region,
    shown_size,
    verify,
)
from mooncake_transfer.bench.plot import plot_results, require_plotting
from mooncake_transfer.bench.verdict import verdict
from mooncake_transfer.cli.visitor import visitor_config
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.drivers import probe_drivers
from mooncake_transfer.engine import TransferEngine
from mooncake_transfer.process import announce_ready, configure_logging, watch_lifeline

__all__ = ["bench_commands"]

FAILED, WRONG_USE = 1, 2

bench_commands = typer.Typer(
    name="bench", help="Measure the transfer engine on your machines.", no_args_is_help=True
)


@bench_commands.callback()
def _describe() -> None:
    """Measure the transfer engine on your machines."""


@bench_commands.command()
def transfer(
    target: Annotated[
        str, typer.Option(help="host:port of a `mooncake bench serve`; without it one is started here.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Block sizes, separated by commas.")] = "64,4K,64K,1M,16M",
    batches: Annotated[str, typer.Option(help="Blocks of a transfer.")] = "1,64",
    threads: Annotated[str, typer.Option(help="Threads at the same time.")] = "1",
    ops: Annotated[str, typer.Option(help="write, read or both.")] = "write,read",
    drivers: Annotated[str, typer.Option(help="Drivers; without it every one that moves memory here.")] = "",
    seconds: Annotated[float, typer.Option(help="How long each combination is measured.")] = 0.5,
    max_size: Annotated[str, typer.Option(help="Leave out what needs more memory.")] = "256M",
    check: Annotated[bool, typer.Option(help="Compare bytes before measuring.")] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results: FILE.png or FILE.svg.")] = None,
) -> None:
    """Measure sizes x batches x threads x drivers x read and write, with percentiles of latency.

    Exit status: 0, 1 when a transfer failed or bytes came back changed, 2 for wrong use.
    """
    console, errors = plain_console(), plain_console(stderr=True)
    try:
        plan = Plan(
            drivers=_drivers(drivers),
            ops=tuple(part.strip() for part in ops.split(",")),
            sizes=parse_sizes(sizes),
            batches=parse_counts(batches, "a number of blocks"),
            threads=parse_counts(threads, "a number of threads"),
            seconds=seconds,
            max_bytes=parse_size(max_size),
        )
        if plot is not None:
            require_plotting(plot)
        for file in (json, plot):
            if file is not None:
                require_writable(file)
        with _target(target, plan.region_bytes) as (address, target_cpu_s):
            results = _measure_all(plan, address, target_cpu_s, check, errors, strict=bool(drivers))
    except (ConfigError, DriverUnavailable) as error:
        print_line(errors, f"mooncake bench: {error}")
        raise typer.Exit(WRONG_USE) from None
    except TransferError as error:
        print_line(errors, f"mooncake bench: {type(error).__name__}: {error}")
        raise typer.Exit(FAILED) from None
    _show(results, console)
    if plan.skipped():
        print_line(console, f"{plan.skipped()} combinations need more than --max-size {max_size}: left out")
    print_line(console, verdict(results, both_sides=not target))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    if plot is not None:
        plot_results(results, plot)


@bench_commands.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, and to be known by; without it as configured.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 0,
    max_size: Annotated[str, typer.Option(help="Most memory lent to one peer.")] = "4G",
    ready_fd: Annotated[int | None, typer.Option(help='Write {"address": ...} here when ready.')] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="End at once when this pipe is closed.")] = None,
) -> None:
    """Be the target of `mooncake bench transfer --target`, until SIGTERM or SIGINT.

    Lends memory to whoever asks: for networks you trust.
    """
    configure_logging("WARNING")
    watch_lifeline(lifeline_fd)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        max_bytes = parse_size(max_size)
        engine = TransferEngine(visitor_config(port=port, **({} if host is None else {"host": host})))
    except TransferError as error:
        print_line(plain_console(stderr=True), f"mooncake bench serve: {error}")
        raise typer.Exit(WRONG_USE) from None
    with engine:
        BenchTarget(engine, max_bytes)
        if ready_fd is None:
            typer.echo(f"mooncake bench transfer --target {engine.address}")
        announce_ready(ready_fd, {"address": engine.address})
        stop.wait()


def _drivers(names: str) -> tuple[str, ...]:
    if names:
        return tuple(part.strip() for part in names.split(","))
    found = probe_drivers(visitor_config().driver_options)
    usable = tuple(status.name for status in found if status.usable)
    if not usable:
        reasons = "; ".join(f"{status.name}: {status.reason}" for status in found) or "none is installed"
        raise DriverUnavailable(f"no driver can be used here ({reasons}); see `mooncake doctor`")
    return usable


@contextmanager
def _target(address: str, nbytes: int) -> Iterator[tuple[str, Callable[[], float]]]:
    if address:
        yield address, lambda: 0.0
        return
    with LocalTarget(nbytes) as local:
        yield local.address, local.cpu_s


def _measure_all(
    plan: Plan,
    address: str,
    target_cpu_s: Callable[[], float],
    check: bool,
    errors: Console,
    *,
    strict: bool,
) -> list[Result]:
    """Measure every point. Unless ``strict``, a driver that cannot even begin is left out, with a line."""

    def cpu_s() -> float:
        return time.process_time() + target_cpu_s()

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    results: list[Result] = []
    left_out = []
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("starting", total=len(plan.points()))
        for driver in plan.drivers:
            points = [point for point in plan.points() if point.driver == driver]
            begun = False
            try:
                for point, result in _measured(driver, points, plan, address, check, cpu_s):
                    description = f"{driver} {point.op} {point.batch} x {shown_size(point.size)}"
                    if result is None:
                        progress.update(task, description=description)
                    else:
                        begun = True
                        results.append(result)
                        progress.advance(task)
            except (DriverUnavailable, NoRoute) as error:
                if strict or begun:
                    raise
                left_out.append(f"{driver}: {error}")
                print_line(progress.console, f"left out: {left_out[-1]}")
                progress.advance(task, len(points))
    if not results:
        raise DriverUnavailable(f"no driver moves memory here ({'; '.join(left_out)}); see `mooncake doctor`")
    return results


def _measured(
    driver: str, points: list[Point], plan: Plan, address: str, check: bool, cpu_s: Callable[[], float]
) -> Iterator[tuple[Point, Result | None]]:
    """Each point twice: with None before it is measured, and with what was found."""
    with TransferEngine(visitor_config(drivers=(driver,))) as engine:
        local = engine.allocate(plan.region_bytes, prefault=True)
        remote = request_region(engine, address, plan.region_bytes)
        for point in points:
            yield point, None
            if check:
                verify(engine, local, remote, point)
            yield point, measure(engine, local, remote, point, plan.seconds, cpu_s)


def require_writable(file: Path) -> None:
    """Check, before anything is measured, that results can be written to ``file``. Raises ConfigError."""
    there = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write results to {file}: {error.strerror}; name a file in a folder that you may write to"
        ) from None
    if not there:
        file.unlink()


def _show(results: list[Result], console: Console) -> None:
    # Narrow enough for 80 columns; a number that is cut is wrong, so where it is wider, the terminal wraps.
    threads = {result.point.threads for result in results}
    names = ["size", "batch", "threads", "GB/s", "per s", "p50 us", "p90", "p99", "p99.9", "cores"]
    if len(threads) == 1:
        names.remove("threads")
        print_line(console, f"threads at the same time: {threads.pop()}")
    table = Table(box=SIMPLE, padding=0, show_edge=False)
    for name in ("driver", "op"):
        table.add_column(name, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        point = result.point
        latencies = (result.p50_us, result.p90_us, result.p99_us, result.p999_us)
        table.add_row(
            point.driver,
            point.op,
            shown_size(point.size),
            str(point.batch),
            *([str(point.threads)] if "threads" in names else []),
            f"{result.gb_per_s:.3g}",
            f"{result.transfers_per_s:,.0f}",
            *(f"{value:.1f}" if value < 100 else f"{value:,.0f}" for value in latencies),
            f"{result.cores:.1f}",
        )
    needed = Measurement.get(console, console.options.update(width=1000), table).maximum
    plain_console(width=max(console.width, needed)).print(table)
