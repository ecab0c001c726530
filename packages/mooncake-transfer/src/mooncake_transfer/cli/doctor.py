"""``mooncake doctor``: what can be used on this machine, and the reason and remedy for what cannot."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mooncake_transfer._errors import ConfigError
from mooncake_transfer._opening import examine_drivers
from mooncake_transfer.config import TransferConfig
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.drivers import DriverStatus
from mooncake_transfer.limits import WARNING, Limit, machine_limits
from mooncake_transfer.plugins import CLI_GROUP, BrokenPlugin, driver_plugins, load_plugins

__all__ = ["Report", "doctor", "examine"]

INSTALL = "pip install mooncake-transfer[shm,tcp]"
STYLES = {"ok": "green", "warning": "yellow", "unknown": "dim"}


class Report(msgspec.Struct, frozen=True):
    """What ``mooncake doctor --json`` prints.

    Attributes:
        healthy: the configuration and at least one driver can be used, and no plugin is broken.
        remedy: what to do when it is not healthy.
        versions: of this package, Python and the kernel.
        drivers: every installed driver, the one that is tried first in front.
        broken_plugins: what was found and could not be imported or asked.
        limits: what the machine allows.
    """

    healthy: bool
    remedy: str
    versions: dict[str, str]
    drivers: list[DriverStatus]
    broken_plugins: list[BrokenPlugin]
    limits: list[Limit]


def examine() -> Report:
    """Ask every driver what an engine would open, and look at every limit. Changes nothing.

    The options of drivers are those of file and environment, as ``TransferConfig.load()`` reads them.
    """
    problem = ""
    try:
        config = TransferConfig.load()
    except ConfigError as error:
        config, problem = TransferConfig(), f"the configuration cannot be used: {error}"
    drivers = examine_drivers(config)
    broken = [*driver_plugins().broken, *load_plugins(CLI_GROUP).broken]
    remedy = problem or _remedy(drivers, broken)
    return Report(not remedy, remedy, _versions(), drivers, broken, machine_limits())


def _remedy(drivers: list[DriverStatus], broken: list[BrokenPlugin]) -> str:
    if not drivers:
        return f"no driver is installed, so nothing can be moved; try: {INSTALL}"
    if not any(status.usable for status in drivers):
        return f"none of the installed drivers can be used here; their reasons are above, or try: {INSTALL}"
    return "reinstall or remove the packages whose plugins are broken" if broken else ""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show every driver, usable or the exact reason why not, and the limits of this machine.

    Changes nothing. Ends with exit status 0 when the configuration and at least one driver can be used and
    no plugin is broken, else with 1. Limits never change the exit status.
    """
    report = examine()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _show(report, plain_console())
    if not report.healthy:
        raise typer.Exit(1)


def _versions() -> dict[str, str]:
    try:
        own = version("mooncake-transfer")
    except PackageNotFoundError:
        own = "unknown (not installed as a package)"
    return {"mooncake-transfer": own, "Python": platform.python_version(), "kernel": platform.release()}


def _show(report: Report, console: Console) -> None:
    print_line(console, ", ".join(f"{name} {text}" for name, text in report.versions.items()))
    if report.drivers:
        drivers = Table(title="drivers")
        for name in ("driver", "priority", "usable"):
            drivers.add_column(name, no_wrap=True)
        drivers.add_column("devices or reason", overflow="fold")
        for status in report.drivers:
            usable = "[green]yes[/]" if status.usable else "[red]no[/]"
            detail = ", ".join(status.devices) if status.usable else status.reason
            drivers.add_row(escape(status.name), str(status.priority), usable, escape(detail))
        console.print(drivers)
    for broken in report.broken_plugins:
        text = f"plugin {broken.name} ({broken.origin}) cannot be used: {broken.reason}"
        print_line(console, text, "red")
    # Paragraphs, which the terminal wraps: a remedy that a narrow column cuts helps nobody.
    for limit in report.limits:
        state = f"[{STYLES[limit.state]}]{limit.state}[/]"
        console.print(f"{state} {escape(limit.name)}: {escape(limit.value)}", soft_wrap=True)
        for advice in (limit.effect, limit.remedy):
            if advice:
                print_line(console, f"    {advice}")
    print_line(console, _conclusion(report))


def _conclusion(report: Report) -> str:
    usable = [status.name for status in report.drivers if status.usable]
    warnings = sum(limit.state == WARNING for limit in report.limits)
    words = [report.remedy or f"usable drivers, best first: {', '.join(usable)}"]
    if warnings:
        words.append(f"{warnings} of {len(report.limits)} limits may be in the way")
    return "; ".join(words)
