"""``mooncake store``: commands of the store."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Annotated

import typer
from rich.console import Console

from mooncake_store._errors import ConfigError
from mooncake_store.config import StoreConfig
from mooncake_store.master import Master
from mooncake_store.protocol import StoreStats
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError
from mooncake_transfer.hooks import hookimpl
from mooncake_transfer.process import announce_ready, configure_logging, watch_lifeline

__all__ = ["mooncake_cli"]

WRONG_USE = 2
REPORT_INTERVAL_S = 30.0

log = logging.getLogger("mooncake_store.master")
store_commands = typer.Typer(name="store", help="The distributed KV-cache store.", no_args_is_help=True)


@hookimpl
def mooncake_cli(app: typer.Typer) -> None:
    """Add ``mooncake store`` to the program."""
    app.add_typer(store_commands)


@store_commands.callback()
def _describe() -> None:
    """The distributed KV-cache store."""


@store_commands.command()
def master(
    host: Annotated[str, typer.Option(help="Address to listen on, and to be known by.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 0,
    lease_ttl_s: Annotated[float, typer.Option(help="How long a silent reader keeps bytes in place.")] = 10.0,
    reservation_ttl_s: Annotated[float, typer.Option(help="How long a put may take.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ready_fd: Annotated[int | None, typer.Option(help='Write {"address": ...} here when ready.')] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="End at once when this pipe is closed.")] = None,
) -> None:
    """Run a master until SIGTERM or SIGINT: the metadata of a store, no bytes."""
    configure_logging(log_level)
    watch_lifeline(lifeline_fd)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = StoreConfig(lease_ttl_s=lease_ttl_s, reservation_ttl_s=reservation_ttl_s)
        engine = TransferEngine(TransferConfig(host=host, port=port))
    except (ConfigError, TransferError) as error:
        Console(stderr=True).print(f"mooncake store master cannot start: {error}", markup=False)
        raise typer.Exit(WRONG_USE) from None
    with engine, Master(engine, config) as serving:
        log.info("ready address=%s epoch=%d", serving.address, serving.epoch)
        announce_ready(ready_fd, {"address": serving.address})
        while not stop.wait(REPORT_INTERVAL_S):
            _report(serving.stats())
        log.info("stopping")
    log.info("stopped")


def _report(stats: StoreStats) -> None:
    log.info("stats %s", " ".join(f"{name}={getattr(stats, name)}" for name in stats.__struct_fields__))
