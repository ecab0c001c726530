"""``mooncake topology``: what lies where in this machine, as text, JSON or a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.topology import Override, Topology

__all__ = ["topology"]


def topology(
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a drawing to this file.", dir_okay=False)] = None,
    override: Annotated[
        Path | None, typer.Option(help="Correct what the machine says by this TOML or JSON file.")
    ] = None,
) -> None:
    """Show NUMA nodes, NICs, drives, GPUs, and how far they are from one another. Changes nothing."""
    try:
        found = Topology.discover(override=Override.load(override) if override else None)
        if svg:
            svg.write_text(found.render_svg())
    except (ConfigError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            remedy = "name a file in a folder that you may write to"
            reason = f"cannot write the drawing to {svg}: {error.strerror}; {remedy}"
        print_line(plain_console(stderr=True), f"mooncake topology: {reason}", "red")
        raise typer.Exit(2) from None
    if json or not svg:
        typer.echo(found.to_json() + "\n" if json else found.render_text(), nl=False)
