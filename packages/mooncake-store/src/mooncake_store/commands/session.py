"""What the commands on a running store share: options, a client for as long as one runs, exit statuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, ParamSpec

import msgspec
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mooncake_store._errors import (
    ConfigError,
    KeyInvalid,
    MasterError,
    NotAuthorised,
    StoreError,
    ValueInvalid,
)
from mooncake_store.client import Store
from mooncake_store.config import StoreConfig
from mooncake_transfer import TransferEngine
from mooncake_transfer.cli.visitor import visitor_config
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.errors import ConfigError as TransferConfigError
from mooncake_transfer.errors import TransferError

__all__ = [
    "FAILED",
    "REFUSED",
    "UNREACHABLE",
    "WRONG_USE",
    "AsJson",
    "KeyEncoding",
    "MasterAddress",
    "Tenant",
    "TokenFile",
    "as_key",
    "checked",
    "client_of",
    "fail",
    "print_json",
    "progress",
]

# Exit statuses: something asked for is not there or could not be done; the command was used wrongly; the
# store does not answer; it does not let this user do that.
FAILED, WRONG_USE, UNREACHABLE, REFUSED = 1, 2, 3, 4
P = ParamSpec("P")

MasterAddress = Annotated[
    str,
    typer.Option(
        "--master",
        "-m",
        envvar="MOONCAKE_STORE_MASTER",
        help="host:port of the master, or the URL of a cluster of masters.",
    ),
]
Tenant = Annotated[str, typer.Option(help="Whose keys.", envvar="MOONCAKE_STORE_TENANT")]
TokenFile = Annotated[
    str,
    typer.Option(envvar="MOONCAKE_STORE_TOKEN_FILE", help="File with the token that the master asks for."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyEncoding = Annotated[bool, typer.Option("--hex", help="Keys are written in hexadecimal.")]


@contextmanager
def client_of(master: str, tenant: str = "", token_file: str = "") -> Iterator[Store]:
    """A client for as long as a command runs. Engine settings are those of MOONCAKE_CONFIG."""
    if not master:
        raise ConfigError(
            "no store is named; give its master as --master HOST:PORT, or set MOONCAKE_STORE_MASTER"
        )
    with (
        TransferEngine(visitor_config()) as engine,
        Store(engine, master, config=StoreConfig(tenant=tenant, token_file=token_file)) as store,
    ):
        yield store


def checked(command: Callable[P, None]) -> Callable[P, None]:
    """End the command with a sentence and a status where it raises an error of the store or its engine."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (ConfigError, TransferConfigError, KeyInvalid, ValueInvalid) as error:
            raise fail(command.__name__, str(error), WRONG_USE) from None
        except NotAuthorised as error:
            raise fail(command.__name__, str(error), REFUSED) from None
        except MasterError as error:
            raise fail(command.__name__, str(error), UNREACHABLE) from None
        except (StoreError, TransferError, OSError) as error:
            raise fail(command.__name__, str(error), FAILED) from None

    return run


def fail(command: str, reason: str, status: int) -> typer.Exit:
    """Say why a command ends, and give what to raise."""
    print_line(plain_console(stderr=True), f"mooncake store {command}: {reason}")
    return typer.Exit(status)


def as_key(text: str, in_hex: bool) -> bytes:
    """A key from the command line. Raises KeyInvalid."""
    if not in_hex:
        return text.encode(errors="surrogateescape")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise KeyInvalid(f"{text!r:.80} is no hexadecimal key; leave --hex out for text") from None


def print_json(value: object) -> None:
    """Write a value as JSON to standard output."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def progress(*, shown: bool) -> Progress:
    """A bar of bytes on standard error; where that is no terminal, and when not ``shown``, nothing."""
    console = plain_console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not shown or not console.is_terminal,
    )
