"""``mooncake store top``: a store, live."""

from __future__ import annotations

import threading
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mooncake_store._errors import ConfigError, MasterUnreachable
from mooncake_store.client import Store
from mooncake_store.commands.session import AsJson, MasterAddress, TokenFile, checked, client_of, print_json
from mooncake_store.grafana import dashboard as dashboard_json
from mooncake_store.protocol import SegmentReport, StoreReport
from mooncake_store.telemetry import quantile_s
from mooncake_store.telemetry.shown import as_json as report_as_json
from mooncake_store.telemetry.shown import fragmentation, name_of
from mooncake_transfer.cli.interval import Interval
from mooncake_transfer.console import plain_console

__all__ = ["dashboard", "render", "top"]

HOT = 10
BAR_WIDTH = 24
USES = (
    ("evictable", "blue"),
    ("pinned", "cyan"),
    ("leased", "yellow"),
    ("reserved", "magenta"),
    ("retiring", "bright_black"),
)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@checked
def top(
    master: MasterAddress = "",
    token_file: TokenFile = "",
    interval_s: Interval = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show segments, hit rates, hot objects and latencies of a store, until Ctrl-C.

    Exit status: 2 for wrong use, 3 when the store does not answer at the start.
    """
    if as_json and not once:
        raise ConfigError("--json needs --once")
    console = plain_console()
    with client_of(master, token_file=token_file) as store:
        before = store.report(HOT)
        if not once:
            return _follow(store, before, interval_s, console)
        threading.Event().wait(interval_s)
        report = store.report(HOT)
    if as_json:
        print_json(report_as_json(report))
    else:
        console.print(render(before, report))


def dashboard() -> None:
    """Write the Grafana dashboard to standard output; import it in Grafana."""
    typer.echo(dashboard_json(), nl=False)


def _follow(store: Store, before: StoreReport, interval_s: float, console: Console) -> None:
    pause = threading.Event()
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                pause.wait(interval_s)
                try:
                    report = store.report(HOT)
                except MasterUnreachable as error:
                    live.update(Text(str(error), style="red"), refresh=True)
                    continue
                live.update(render(before, report), refresh=True)
                before = report
    except KeyboardInterrupt:
        return


def render(before: StoreReport, report: StoreReport) -> RenderableType:
    """Lay a report out for a terminal, with what happened since the one before."""
    parts: list[RenderableType] = [_headline(before, report), _segments(report.segments)]
    if report.hot:
        parts.append(_hot(report))
    return Group(*parts, _requests(before, report))


def _headline(before: StoreReport, report: StoreReport) -> Text:
    stats, old = report.stats, before.stats
    passed_s = max(report.now_s - before.now_s, 1e-9)
    same = report.epoch == before.epoch
    hits, misses = (stats.hits - old.hits, stats.misses - old.misses) if same else (0, 0)
    stored, evicted = (stats.stored - old.stored, stats.evicted - old.evicted) if same else (0, 0)
    rate = f"{100 * hits / (hits + misses):.1f} % hits of" if hits + misses else "no hits in"
    return Text(
        f"{stats.objects:,} objects  {_bytes(stats.used_bytes)} of {_bytes(stats.capacity_bytes)}  "
        f"{rate} {(hits + misses) / passed_s:,.0f} reads/s  {stored / passed_s:,.0f} puts/s  "
        f"{evicted / passed_s:,.0f} evictions/s  {stats.clients} clients",
        style="bold",
    )


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    return table


def _segments(segments: list[SegmentReport]) -> Table:
    table = _table("segment", "owner", "room", "size", "free", "hole", "fragmented", left=3)
    for one in segments:
        bar = Text()
        for use, style in USES:
            share = getattr(one, f"{use}_bytes") / one.capacity_bytes if one.capacity_bytes else 0
            bar.append("█" * round(share * BAR_WIDTH), style=style)
        bar.append("░" * max(0, BAR_WIDTH - len(bar)), style="dim")
        sizes = (one.capacity_bytes, one.free_bytes, one.largest_hole_bytes)
        table.add_row(
            f"{one.segment:x}",
            escape(one.address or "local") + (" (draining)" if one.draining else ""),
            bar,
            *(_bytes(size) for size in sizes),
            f"{100 * fragmentation(one):.0f} %",
        )
    return table


def _hot(report: StoreReport) -> Table:
    table = _table("hot object", "reads lately", "size")
    for one in report.hot:
        table.add_row(
            escape(name_of(one)), f"{one.reads:,}", "" if one.nbytes is None else _bytes(one.nbytes)
        )
    return table


def _requests(before: StoreReport, report: StoreReport) -> Table:
    table = _table("request", "/s", "p50", "p99", "failed")
    passed_s = max(report.now_s - before.now_s, 1e-9)
    for name, latency in sorted(report.requests.items()):
        old = before.requests.get(name)
        since = latency.count - (old.count if old is not None and report.epoch == before.epoch else 0)
        quantiles = (_seconds(quantile_s(latency, share)) for share in (0.5, 0.99))
        table.add_row(name, f"{since / passed_s:,.0f}", *quantiles, str(latency.failures))
    return table


def _bytes(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit and size < 100 else f"{size:.0f} {UNITS[unit]}"


def _seconds(bound_s: float | None) -> str:
    if bound_s is None:
        return ""
    if bound_s == float("inf"):
        return "> 16 s"
    return f"<={bound_s * 1e3:.3g} ms" if bound_s >= 1e-3 else f"<={bound_s * 1e6:.0f} us"
