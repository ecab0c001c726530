"""``mooncake conductor``: runs the gateway in front of a cluster of workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from mooncake_conductor._errors import ConfigError, ListenFailed, TraceUnreadable
from mooncake_conductor.config import load_config
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.errors import ConfigError as TransferConfigError
from mooncake_transfer.hooks import hookimpl
from mooncake_transfer.process import announce_ready, configure_logging, watch_lifeline

__all__ = ["conductor", "mooncake_cli", "simulate"]

USAGE_ERROR_STATUS = 2


@hookimpl
def mooncake_cli(app: typer.Typer) -> None:
    """Add ``mooncake conductor`` and ``mooncake simulate``."""
    app.command()(conductor)
    app.command()(simulate)


def conductor(
    host: Annotated[str | None, typer.Option(help="Address to serve on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0 takes any free one.")] = None,
    worker: Annotated[list[str] | None, typer.Option(help="URL of a worker; repeat it for more.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Placement policy: cache_aware, round_robin, ...")
    ] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ready_fd: Annotated[
        int | None, typer.Option(help="Descriptor that gets one line of JSON when ready.")
    ] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="Pipe whose end ends this process.")] = None,
) -> None:
    """Serve an OpenAI-compatible API with the given prefill and decode workers.

    Other settings are read from MOONCAKE_CONDUCTOR_<FIELD> variables, see the package's README.
    """
    # Only now: the other commands of the program need nothing of what a server imports.
    from mooncake_conductor.server import ConductorServer

    watch_lifeline(lifeline_fd)
    options = {"host": host, "port": port, "workers": tuple(worker) if worker else None, "policy": policy}
    try:
        configure_logging(log_level)
        server = ConductorServer(load_config(options))
        asyncio.run(server.serve(lambda: announce_ready(ready_fd, {"url": server.url})))
    except (ConfigError, ListenFailed, TransferConfigError) as error:
        print_line(plain_console(stderr=True), f"mooncake conductor: {error}")
        raise typer.Exit(USAGE_ERROR_STATUS) from error


def simulate(
    trace: Annotated[Path, typer.Option(help="A trace in Mooncake's format: a JSON object a line.")],
    figure: Annotated[int | None, typer.Option(help="Of the FAST'25 paper: 5, 9, 10 or 13.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy to simulate; repeat it for more, all without it.")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Prefill instances.")] = 8,
    decode: Annotated[int, typer.Option(help="Decode instances.")] = 8,
    cache_tokens: Annotated[
        float, typer.Option(help="Tokens that each prefill instance's cache holds.")
    ] = 3e6,
    speed: Annotated[float, typer.Option(help="How many times faster the requests come.")] = 1.0,
    seeds: Annotated[int, typer.Option(help="Runs of which the mean is taken.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was found there, too.")] = None,
) -> None:
    """Simulate a cluster that serves a trace: a figure of the paper, or policies beside each other."""
    # Only now: numba takes a second.
    from mooncake_conductor.simulator.command import Asked, run

    asked = Asked(trace, figure, tuple(policy or ()), prefill, decode, cache_tokens, speed, seeds, json_file)
    try:
        run(asked, plain_console())
    except (ConfigError, TraceUnreadable) as error:
        print_line(plain_console(stderr=True), f"mooncake simulate: {error}")
        raise typer.Exit(USAGE_ERROR_STATUS) from error
