"""``mooncake top``: live rails, peers, rates and errors of running engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mooncake_transfer._errors import TransferError
from mooncake_transfer.beacon import engines_here
from mooncake_transfer.cli.visitor import visitor_config
from mooncake_transfer.engine import TransferEngine
from mooncake_transfer.introspection import RailRate, Snapshot, ask_snapshot, rail_rates

__all__ = ["View", "top"]

FAILED, WRONG_USE = 1, 2
STATE_STYLES = {"closed": "green", "suspect": "yellow", "half-open": "yellow", "open": "red"}


class View(msgspec.Struct, frozen=True):
    """What is shown of one engine.

    Attributes:
        address: where it was asked.
        failure: why it did not answer; empty when it did.
        snapshot: what it said; None when it did not answer.
        rates: what its rails did since it was asked before.
    """

    address: str
    failure: str = ""
    snapshot: Snapshot | None = None
    rates: list[RailRate] = []


def top(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS]...", help="host:port of engines; without any, those of this host."),
    ] = None,
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)] = 1.0,
    timeout_s: Annotated[float, typer.Option(help="How long an engine may take to answer.")] = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Show live rails, peers, GB/s and errors of engines, until Ctrl-C.

    Without an address it shows the engines of this host that this user runs. Exit status: with --once 1 when
    an engine did not answer; 2 for wrong use.
    """
    console, errors = Console(), Console(stderr=True)
    if json and not once:
        _print_line(errors, "mooncake top: --json needs --once")
        raise typer.Exit(WRONG_USE)
    chosen = addresses or sorted(engines_here())
    if not chosen:
        _print_line(errors, "mooncake top: no engine of this user runs on this host; name one as host:port")
        raise typer.Exit(WRONG_USE)
    try:
        engine = TransferEngine(visitor_config())
    except TransferError as error:
        _print_line(errors, f"mooncake top: no engine to ask from: {error}")
        raise typer.Exit(WRONG_USE) from None
    with engine:
        if once:
            first = _look(engine, chosen, [], timeout_s)
            threading.Event().wait(interval_s)
            views = _look(engine, chosen, first, timeout_s)
            _print_once(views, json, console)
            raise typer.Exit(FAILED if any(view.failure for view in views) else 0)
        _follow(engine, chosen, interval_s, timeout_s, console)


def _follow(
    engine: TransferEngine, addresses: Sequence[str], interval_s: float, timeout_s: float, console: Console
) -> None:
    views: list[View] = []
    pause = threading.Event()
    try:
        if not console.is_terminal:  # a pipe or a file gets one picture after another
            while not pause.wait(interval_s if views else 0):
                views = _look(engine, addresses, views, timeout_s)
                console.print(render(views))
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not pause.wait(interval_s if views else 0):
                views = _look(engine, addresses, views, timeout_s)
                live.update(render(views), refresh=True)
    except KeyboardInterrupt:
        return


def _look(
    engine: TransferEngine, addresses: Sequence[str], before: Sequence[View], timeout_s: float
) -> list[View]:
    earlier = {view.address: view.snapshot for view in before}

    def look(address: str) -> View:
        try:
            snapshot = ask_snapshot(engine, address, timeout_s)
        except TransferError as error:
            return View(address, f"{type(error).__name__}: {error}")
        return View(address, "", snapshot, rail_rates(earlier.get(address), snapshot))

    # All at the same time: one that does not answer holds up no other.
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(look, addresses))


def _print_once(views: list[View], json: bool, console: Console) -> None:
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(views), indent=2).decode())
    else:
        console.print(render(views))


def _print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def render(views: Sequence[View]) -> RenderableType:
    """Lay the views out for a terminal."""
    parts: list[RenderableType] = []
    for view in views:
        if view.snapshot is None:
            parts.append(Text(f"{view.address}  {view.failure}", style="red"))
        else:
            parts += [_headline(view.snapshot, view.rates), _rails(view.rates), _drivers(view.snapshot)]
    return Group(*parts)


def _headline(snapshot: Snapshot, rates: Sequence[RailRate]) -> Text:
    moving = sum(rate.bytes_per_s for rate in rates) / 1e9
    peers = len({rate.rail.peer for rate in rates})
    return Text(
        f"{snapshot.address}  process {snapshot.pid} on {snapshot.host}  {moving:.3g} GB/s  {peers} peers  "
        f"{snapshot.regions} regions of {snapshot.region_bytes / (1 << 20):,.0f} MiB",
        style="bold",
    )


def _rails(rates: Sequence[RailRate]) -> Table:
    table = Table("peer", "driver", "rail", "state")
    for name in ("GB/s", "slices/s", "p50 us <=", "p99 us <=", "in flight MiB", "errors", "retries"):
        table.add_column(name, justify="right")
    table.add_column("last error")
    for rate in sorted(rates, key=lambda rate: -rate.bytes_per_s):
        rail = rate.rail
        devices = f"{rail.device} -> {rail.remote_device}" if rail.device or rail.remote_device else ""
        quantiles = ["" if value is None else f"{value:,.0f}" for value in (rate.p50_us, rate.p99_us)]
        table.add_row(
            escape(rail.peer),
            escape(rail.driver),
            escape(devices),
            f"[{STATE_STYLES[rail.state]}]{rail.state}[/]",
            f"{rate.bytes_per_s / 1e9:.3g}",
            f"{rate.ops_per_s:,.0f}",
            *quantiles,
            f"{rail.in_flight_bytes / (1 << 20):.1f}",
            str(rail.errors),
            str(rail.retries),
            escape(rail.last_error),
        )
    return table


def _drivers(snapshot: Snapshot) -> Text:
    lines = []
    for name, counters in snapshot.drivers.items():
        lines.append(f"{name}: " + ", ".join(f"{counter} {value:,}" for counter, value in counters.items()))
    return Text("\n".join(lines) + "\n", style="dim")
