"""``mooncake nvmeof``: targets of NVMe over fabrics, by the kernel's initiator or from user space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from mooncake_driver_nvmeof import fabrics
from mooncake_driver_nvmeof.namespaces import namespace
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.errors import TransferError
from mooncake_transfer.hooks import hookimpl

__all__ = ["mooncake_cli"]

Found = TypeVar("Found")
Port = Annotated[int, typer.Option(help="Its port.")]
Transport = Annotated[str, typer.Option(help="tcp, rdma, loop or fc.")]
Limit = Annotated[float, typer.Option("--timeout", help="Seconds that it may take.")]

commands = typer.Typer(no_args_is_help=True, help="Targets of NVMe over fabrics.")


@commands.command()
def discover(address: str, port: Port = 4420, transport: Transport = "tcp", limit_s: Limit = 30.0) -> None:
    """List the subsystems that a discovery service knows (as root, by nvme-cli)."""
    found = _tried(lambda: fabrics.discover(address, port=port, transport=transport, timeout_s=limit_s))
    for each in found:
        typer.echo(f"{each.nqn}  {each.transport} {each.address} {each.service}")


@commands.command()
def connect(
    nqn: str,
    address: Annotated[str, typer.Argument(help="Not for loop.")] = "",
    port: Port = 4420,
    transport: Transport = "tcp",
    loss_timeout_s: Annotated[int, typer.Option(help="Seconds that I/O waits for a lost target.")] = 600,
    limit_s: Limit = 30.0,
) -> None:
    """Have the kernel connect to a subsystem (as root, by nvme-cli), and show its block devices."""
    found = _tried(
        lambda: fabrics.connect(
            nqn,
            address,
            port=port,
            transport=transport,
            loss_timeout_s=loss_timeout_s,
            timeout_s=limit_s,
        )
    )
    for each in found:
        typer.echo(f"{each.device}  namespace {each.nsid}, {each.nbytes} bytes, uuid {each.uuid or 'none'}")


@commands.command()
def disconnect(nqn: str, limit_s: Limit = 30.0) -> None:
    """Have the kernel give a subsystem up (as root, by nvme-cli)."""
    _tried(lambda: fabrics.disconnect(nqn, timeout_s=limit_s))


@commands.command()
def identify(url: str, limit_s: Limit = 5.0) -> None:
    """Ask the target of nvme-tcp://HOST:PORT/NQN?nsid=1 for the namespace, from user space, without root."""
    found = _tried(lambda: namespace(url, timeout_s=limit_s))
    typer.echo(found.location)
    typer.echo(f"{found.nbytes} bytes in blocks of {found.block_bytes}, {found.model} {found.serial}")
    typer.echo(f"uuid {found.uuid.hex()}, nguid {found.nguid.hex()}")


def _tried(what: Callable[[], Found]) -> Found:
    try:
        return what()
    except TransferError as error:
        print_line(plain_console(stderr=True), str(error), "red")
        raise typer.Exit(2) from None


@hookimpl
def mooncake_cli(app: typer.Typer) -> None:
    """Add ``mooncake nvmeof``."""
    app.add_typer(commands, name="nvmeof")
