"""``mooncake doctor``: what can be used on this machine, and the reason for what cannot."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mooncake_transfer.drivers import probe_drivers
from mooncake_transfer.plugins import driver_plugins

__all__ = ["doctor"]


def doctor() -> None:
    """Show every installed driver: usable, or the exact reason why not. Never changes anything."""
    console = Console()
    table = Table("driver", "priority", "usable", "devices or reason")
    for status in probe_drivers():
        detail = ", ".join(status.devices) if status.usable else status.reason
        table.add_row(status.name, str(status.priority), "yes" if status.usable else "no", detail)
    console.print(table)
    for broken in driver_plugins().broken:
        console.print(f"plugin {broken.name} ({broken.origin}) cannot be used: {broken.reason}")
