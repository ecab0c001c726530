"""``mooncake store``: commands of the store."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from mooncake_store._errors import ConfigError, MasterNotLeading
from mooncake_store.access import load_rules
from mooncake_store.cluster import open_coordination
from mooncake_store.cluster.master import ClusterMaster
from mooncake_store.commands import COMMANDS
from mooncake_store.commands.serving import HttpFront
from mooncake_store.commands.session import fail
from mooncake_store.config import StoreConfig, read_token
from mooncake_store.eviction import find_eviction
from mooncake_store.master import Master
from mooncake_store.protocol import StoreStats
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.errors import TransferError
from mooncake_transfer.hooks import hookimpl
from mooncake_transfer.process import announce_ready, configure_logging, watch_lifeline

__all__ = ["mooncake_cli"]

WRONG_USE = 2
REPORT_INTERVAL_S = 30.0

log = logging.getLogger("mooncake_store.master")
store_commands = typer.Typer(name="store", help="The distributed KV-cache store.", no_args_is_help=True)
for command in COMMANDS:
    store_commands.command()(command)


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
    cluster: Annotated[
        str,
        typer.Option(help="Be one of several: etcd://HOST:PORT/NAME, redis://HOST:PORT/NAME, sqlite:FILE."),
    ] = "",
    leader_ttl_s: Annotated[
        float, typer.Option(help="In a cluster: another leads when the leader is silent for so long.")
    ] = 5.0,
    http_port: Annotated[
        int | None, typer.Option(help="Serve REST, metrics and a page over HTTP here; 0 takes any free port.")
    ] = None,
    http_host: Annotated[str, typer.Option(help="Address of the HTTP interface; empty: --host.")] = "",
    http_token_file: Annotated[
        Path | None, typer.Option(help="File with the token that HTTP clients need.")
    ] = None,
    eviction: Annotated[str, typer.Option(help="clock, lru, arc, gdsf, or a plugin's.")] = "clock",
    access_file: Annotated[
        str, typer.Option(help="TOML file that says who may act for which tenant; see the README.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ready_fd: Annotated[int | None, typer.Option(help='Write {"address": ...} here when ready.')] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="End at once when this pipe is closed.")] = None,
) -> None:
    """Run a master until SIGTERM or SIGINT: the metadata of a store, no bytes."""
    watch_lifeline(lifeline_fd)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        configure_logging(log_level)
        config = StoreConfig(
            lease_ttl_s=lease_ttl_s,
            reservation_ttl_s=reservation_ttl_s,
            leader_ttl_s=leader_ttl_s,
            recovery=True,
            eviction=find_eviction(eviction).name,
            access_file=access_file,
        )
        if cluster:
            open_coordination(cluster, leader_ttl_s).close()  # a URL that cannot work ends this here
        if access_file:
            load_rules(access_file)  # and so does such a file
        engine = TransferEngine(TransferConfig.load(host=host, port=port))
    except (ConfigError, TransferError) as error:
        print_line(plain_console(stderr=True), f"mooncake store master cannot start: {error}")
        raise typer.Exit(WRONG_USE) from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine)
        ready: dict[str, object] = {"address": engine.address}
        serving: Master | ClusterMaster
        try:
            serving = ClusterMaster(engine, cluster, config) if cluster else Master(engine, config)
            stack.enter_context(serving)
            if http_port is not None:
                where = (http_host or host, http_port, read_token(http_token_file))
                front = stack.enter_context(HttpFront(engine, cluster or engine.address, config, *where))
                ready["url"] = front.url
        except ConfigError as error:
            raise fail("master", str(error), WRONG_USE) from None
        log.info("ready %s", " ".join(f"{name}={value}" for name, value in ready.items()))
        announce_ready(ready_fd, ready)
        while not stop.wait(REPORT_INTERVAL_S):
            with contextlib.suppress(MasterNotLeading):
                _report(serving.stats())
        log.info("stopping")
    log.info("stopped")


def _report(stats: StoreStats) -> None:
    log.info("stats %s", " ".join(f"{name}={getattr(stats, name)}" for name in stats.__struct_fields__))
