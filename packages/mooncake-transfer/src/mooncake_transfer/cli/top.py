"""``mooncake top``: live rails, peers, rates and errors of running engines."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mooncake_transfer._address import split_address
from mooncake_transfer._arguments import seconds
from mooncake_transfer._errors import ConfigError, TransferError
from mooncake_transfer.beacon import engines_here
from mooncake_transfer.cli.interval import Interval
from mooncake_transfer.cli.visitor import visitor_config
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.engine import TransferEngine
from mooncake_transfer.introspection import RailRate, Snapshot, ask_snapshot, rail_rates

__all__ = ["View", "top"]

FAILED, WRONG_USE = 1, 2
NOBODY = "no engine of this user runs on this host"
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
    interval_s: Interval = 1.0,
    timeout_s: Annotated[float, typer.Option(help="How long an engine may take to answer.")] = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Show live rails, peers, GB/s and errors of engines, until Ctrl-C.

    Without an address it shows the engines of this host that this user runs. MiB are those in flight. Exit
    status: with --once 1 when an engine did not answer; 2 for wrong use, or when there is no engine.
    """
    console, errors = plain_console(), plain_console(stderr=True)
    if json and not once:
        print_line(errors, "mooncake top: --json needs --once")
        raise typer.Exit(WRONG_USE)
    try:
        seconds(timeout_s, "--timeout-s")
        config = visitor_config()
        _check_addresses(addresses or [], config.registry)
    except ConfigError as error:
        print_line(errors, f"mooncake top: {error}")
        raise typer.Exit(WRONG_USE) from None
    try:
        engine = TransferEngine(config)
    except TransferError as error:
        print_line(errors, f"mooncake top: no engine to ask from: {error}")
        raise typer.Exit(WRONG_USE) from None
    with engine:
        watch = _Watch(engine, addresses or [], timeout_s)
        if not once:
            return _follow(watch, interval_s, console)
        watch.look()
        threading.Event().wait(interval_s)
        views = watch.look()
    if not views:
        print_line(errors, f"mooncake top: {NOBODY}; name one as host:port")
        raise typer.Exit(WRONG_USE)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(views), indent=2).decode())
    else:
        console.print(render(views))
    raise typer.Exit(FAILED if any(view.failure for view in views) else 0)


def _check_addresses(addresses: Sequence[str], registry: str) -> None:
    """Raise ConfigError for what no look can ever reach. With a registry, a name is as good."""
    for address in addresses:
        if ":" in address or not registry:
            split_address(address)


class _Watch:
    """Asks engines again and again, and remembers what each said before."""

    def __init__(self, engine: TransferEngine, addresses: Sequence[str], timeout_s: float) -> None:
        self._engine, self._addresses, self._timeout_s = engine, addresses, timeout_s
        self._before: dict[str, Snapshot] = {}

    def look(self) -> list[View]:
        """Ask all at the same time: one that does not answer holds up no other."""
        addresses = self._addresses or sorted(set(engines_here()) - {self._engine.address})
        with ThreadPoolExecutor(max(1, len(addresses))) as pool:
            views = list(pool.map(self._ask, addresses))
        self._before = {view.address: view.snapshot for view in views if view.snapshot is not None}
        # Who was found and does not answer has just ended; who was named shall be missed.
        return [view for view in views if view.snapshot is not None or self._addresses]

    def _ask(self, address: str) -> View:
        try:
            snapshot = ask_snapshot(self._engine, address, self._timeout_s)
        except TransferError as error:
            return View(address, f"{type(error).__name__}: {error}")
        return View(address, "", snapshot, rail_rates(self._before.get(address), snapshot))


def _follow(watch: _Watch, interval_s: float, console: Console) -> None:
    ended = threading.Event()

    def end(number: int, frame: object) -> None:
        ended.set()
        signal.signal(signal.SIGINT, before)  # a second one does not wait for the look that is under way

    # No KeyboardInterrupt: it may come where nothing lets it through, such as a finaliser, and would be lost.
    before = signal.signal(signal.SIGINT, end)
    try:
        if not console.is_terminal:  # a pipe or a file gets one picture after another
            while not ended.is_set():
                console.print(render(watch.look()))
                ended.wait(interval_s)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not ended.is_set():
                live.update(render(watch.look()), refresh=True)
                ended.wait(interval_s)
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGINT, before)


def render(views: Sequence[View]) -> RenderableType:
    """Lay the views out for a terminal."""
    parts: list[RenderableType] = [] if views else [Text(NOBODY)]
    for view in views:
        if view.snapshot is None:
            parts.append(Text(f"{view.address}  {view.failure}\n", style="red", overflow="fold"))
            continue
        parts.append(_headline(view.snapshot, view.rates))
        if view.rates:
            parts += [_rails(view.rates), _last_errors(view.rates)]
        parts.append(_drivers(view.snapshot))
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
    # Terminals are narrow: what is empty in every row has no column.
    devices = any(rate.rail.device or rate.rail.remote_device for rate in rates)
    retries = any(rate.rail.retries for rate in rates)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("peer, rail" if devices else "peer", overflow="fold")
    for name in ("driver", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("GB/s", "slices/s", "p50", "p99", "MiB", "errors", *(["retries"] if retries else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for rate in sorted(rates, key=lambda rate: -rate.bytes_per_s):
        rail = rate.rail
        way = f" {rail.device} -> {rail.remote_device}" if devices else ""
        table.add_row(
            escape(rail.peer + way),
            escape(rail.driver),
            f"[{STATE_STYLES[rail.state]}]{rail.state}[/]",
            f"{rate.bytes_per_s / 1e9:.3g}",
            f"{rate.ops_per_s:,.0f}",
            *(_shown_bound(value) for value in (rate.p50_us, rate.p99_us)),
            f"{rail.in_flight_bytes / (1 << 20):.1f}",
            str(rail.errors),
            *([str(rail.retries)] if retries else []),
        )
    return table


def _shown_bound(value_us: float | None) -> str:
    if value_us is None:
        return ""
    for unit, size_us in (("s", 1e6), ("ms", 1e3)):
        if value_us >= size_us:
            return f"<={value_us / size_us:.3g} {unit}"
    return f"<={value_us:.0f} us"


def _last_errors(rates: Sequence[RailRate]) -> Text:
    rails = [rate.rail for rate in rates if rate.rail.last_error]
    lines = [f"last error of {rail.driver} to {rail.peer}: {rail.last_error}\n" for rail in rails]
    return Text("".join(lines), style="yellow", overflow="fold", end="")


def _drivers(snapshot: Snapshot) -> Text:
    lines = []
    for name, counters in snapshot.drivers.items():
        lines.append(f"{name}: " + ", ".join(f"{counter} {value:,}" for counter, value in counters.items()))
    return Text("\n".join(lines) + "\n", style="dim")
