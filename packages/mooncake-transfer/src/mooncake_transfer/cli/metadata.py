"""``mooncake metadata``: runs the HTTP registry, and shows what any registry holds."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from mooncake_transfer._errors import ConfigError, RegistryError
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.process import announce_ready, configure_logging, watch_lifeline
from mooncake_transfer.registry import open_registry
from mooncake_transfer.registry.records import ENGINES, REGIONS, EngineRecord, RegionRecord, name_of

__all__ = ["metadata"]

USAGE_ERROR_STATUS = 2
FAILURE_STATUS = 1
LOOPBACK = ("127.", "::1", "localhost")

log = logging.getLogger(__name__)

metadata = typer.Typer(help="Registries: where engines find each other by name.", no_args_is_help=True)


@metadata.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0 takes any free one.")] = 8290,
    tls_cert: Annotated[str, typer.Option(help="PEM file of the server's certificate: serves https.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file of the certificate's key.")] = "",
    tls_client_ca: Annotated[
        str, typer.Option(help="PEM file of the CA that clients need a certificate of.")
    ] = "",
    token_file: Annotated[Path | None, typer.Option(help="File with the token that clients need.")] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ready_fd: Annotated[
        int | None, typer.Option(help="Descriptor that gets one line of JSON when ready.")
    ] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="Pipe whose end ends this process.")] = None,
) -> None:
    """Serve a registry over HTTP. It keeps everything in memory; engines announce themselves anew."""
    watch_lifeline(lifeline_fd)
    try:
        configure_logging(log_level)
        # Only now: the other commands of the program need nothing of what a server imports.
        from mooncake_transfer.registry.server import MetadataServer, ServerTls
    except ImportError as error:
        raise _failed("serve", f'{error}; pip install "mooncake-transfer[registry-http]"') from error
    except ConfigError as error:
        raise _failed("serve", str(error)) from error
    try:
        token = _read_token(token_file)
        if bool(tls_cert) != bool(tls_key) or (tls_client_ca and not tls_cert):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        if not 0 <= port <= 65535:
            raise ConfigError(f"--port {port} is outside 0..65535; use 0 for any free port")
        tls = ServerTls(tls_cert, tls_key, tls_client_ca) if tls_cert else None
        server = MetadataServer(host, port, token=token, tls=tls)
        if not (token or tls_client_ca or host.startswith(LOOPBACK)):
            log.warning("anybody who reaches %s may read and change it; see --token-file", server.url)
        asyncio.run(server.serve(lambda: announce_ready(ready_fd, {"url": server.url})))
    except ConfigError as error:
        raise _failed("serve", str(error)) from error


def _read_token(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"--token-file {file} is empty")
    return token


@metadata.command("list")
def list_entries(
    url: Annotated[str, typer.Argument(help="The registry, as in TransferConfig.registry.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout_s: Annotated[float, typer.Option(help="How long each step may take.")] = 5.0,
) -> None:
    """Show the engines and published regions of a registry; never their access keys."""
    try:
        registry = open_registry(url, timeout_s)
        try:
            engines = {
                name_of(key): msgspec.json.decode(value, type=EngineRecord)
                for key, value in registry.list(ENGINES).items()
            }
            regions = {
                name_of(key): msgspec.json.decode(value, type=RegionRecord)
                for key, value in registry.list(REGIONS).items()
            }
        finally:
            registry.close()
    except ConfigError as error:
        raise _failed("list", str(error)) from error
    except (RegistryError, msgspec.MsgspecError) as error:
        raise _failed("list", str(error), FAILURE_STATUS) from error
    if as_json:
        listing = {"engines": engines, "regions": {name: {"epoch": r.epoch} for name, r in regions.items()}}
        typer.echo(msgspec.json.encode(listing))
        return
    table = Table("engine", "address", "epoch", "published regions")
    for name, record in sorted(engines.items()):
        published = [path.partition("/")[2] for path in sorted(regions) if path.partition("/")[0] == name]
        texts = (name, record.address, f"{record.epoch:016x}", ", ".join(published))
        table.add_row(*map(escape, texts))
    plain_console().print(table)


def _failed(command: str, reason: str, status: int = USAGE_ERROR_STATUS) -> typer.Exit:
    print_line(plain_console(stderr=True), f"mooncake metadata {command}: {reason}")
    return typer.Exit(status)
