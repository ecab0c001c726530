"""``mooncake config``: what an engine started here would be configured with, and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.config import load_config
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.layers import flatten

__all__ = ["config"]

USAGE_ERROR_STATUS = 2
PASSWORD = re.compile(r"(?<=://)([^/@:]*):.*@")

config = typer.Typer(help="Settings of the transfer engine.", no_args_is_help=True)


@config.callback()
def _describe_group() -> None:
    """Settings of the transfer engine."""


@config.command()
def show(
    file: Annotated[
        Path | None,
        typer.Option("--config", help=r"TOML file with a \[transfer] table; else MOONCAKE_CONFIG."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every setting with its value and what set it: default, file or variable. Passwords are hidden."""
    try:
        loaded = load_config(file)
    except ConfigError as error:
        print_line(plain_console(stderr=True), f"mooncake config show: {error}")
        raise typer.Exit(USAGE_ERROR_STATUS) from error
    rows = [
        (path, _without_password(value), loaded.origins.get(path, "default"))
        for path, value in flatten(msgspec.structs.asdict(loaded.config))
    ]
    if as_json:
        typer.echo(msgspec.json.encode({path: {"value": v, "origin": origin} for path, v, origin in rows}))
        return
    table = Table("setting", "value", "origin")
    for path, value, origin in rows:
        table.add_row(escape(path), escape(msgspec.json.encode(value).decode()), escape(origin))
    plain_console().print(table)


def _without_password(value: Any) -> Any:
    return PASSWORD.sub(r"\1:***@", value) if isinstance(value, str) else value
