"""``mooncake store copy``, ``move``, ``replicate`` and ``drain``."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from mooncake_store._errors import ConfigError
from mooncake_store.client import Store
from mooncake_store.commands.session import (
    FAILED,
    AsJson,
    KeyEncoding,
    MasterAddress,
    Tenant,
    TokenFile,
    as_key,
    checked,
    client_of,
    fail,
    print_json,
    progress,
)
from mooncake_store.protocol import CopyOutcome, Drained

__all__ = ["copy", "drain", "move", "replicate"]

LOOK_S = 0.5
SegmentName = Annotated[
    str, typer.Argument(help="A segment: its id, as `top` shows it, or the address of its owner.")
]
Timeout = Annotated[float, typer.Option(help="Wait so long for it.", min=0.0)]


@checked
def copy(
    key: Annotated[str, typer.Argument(help="Key of the value.")],
    segment: SegmentName,
    master: MasterAddress = "",
    timeout_s: Timeout = 30.0,
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
) -> None:
    """Make a replica of a value in a segment, unless there is one.

    Exit status: 1 when there is no such value, or no room; 2 for wrong use, 3 when the store does not answer.
    """
    with client_of(master, tenant, token_file) as store:
        store.copy(as_key(key, in_hex), _segment(store, segment), timeout_s=timeout_s)


@checked
def move(
    key: Annotated[str, typer.Argument(help="Key of the value.")],
    source: SegmentName,
    target: SegmentName,
    master: MasterAddress = "",
    timeout_s: Timeout = 30.0,
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
) -> None:
    """Make a replica of a value in one segment in place of that in another one.

    Exit status: 1 when there is no such value, or no room; 2 for wrong use, 3 when the store does not answer.
    """
    with client_of(master, tenant, token_file) as store:
        places = _segment(store, source), _segment(store, target)
        store.move(as_key(key, in_hex), *places, timeout_s=timeout_s)


@checked
def replicate(
    keys: Annotated[list[str], typer.Argument(help="Keys of the values.")],
    replicas: Annotated[int, typer.Option(help="Copies in all, each with another owner.")],
    master: MasterAddress = "",
    timeout_s: Timeout = 30.0,
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
    as_json: AsJson = False,
) -> None:
    """Have so many replicas of values from now on: more for hot ones, or fewer again.

    Exit status: 1 when a value is not there or has fewer, 2 for wrong use, 3 when the store does not answer.
    """
    with client_of(master, tenant, token_file) as store:
        wanted = [as_key(key, in_hex) for key in keys]
        outcomes = store.replicate(wanted, replicas, timeout_s=timeout_s)
    if as_json:
        named = zip(keys, outcomes, strict=True)
        print_json([{"key": key, "outcome": outcome.name.lower()} for key, outcome in named])
    short = [
        f"{key}: {outcome.name.lower()}"
        for key, outcome in zip(keys, outcomes, strict=True)
        if outcome is not CopyOutcome.STORED
    ]
    if short:
        raise fail("replicate", f"{len(short)} of {len(keys)} have fewer replicas; {short[0]:.100}", FAILED)


@checked
def drain(
    segment: SegmentName,
    master: MasterAddress = "",
    timeout_s: Timeout = 600.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="Let it take new values again.")] = False,
    token_file: TokenFile = "",
    as_json: AsJson = False,
) -> None:
    """Let a segment become empty: it takes nothing new, and its values are copied to others.

    Afterwards its owner may leave without a value being lost. Where there is no room elsewhere, what would be
    evicted next leaves. A `mooncake store node` does the same by itself when it is told to end by SIGTERM.

    Exit status: 1 when values are left (it goes on in the background), 2 for wrong use, 3 when the store does
    not answer.
    """
    with client_of(master, token_file=token_file) as store:
        number = _segment(store, segment)
        shown = store.stop_draining(number) if cancel else _drained(store, number, timeout_s, as_json)
    if as_json:
        print_json({**msgspec.structs.asdict(shown), "segment": f"{number:x}"})
    elif not cancel:
        typer.echo(f"{shown.moved} values moved ({shown.moved_bytes} bytes), {shown.gone} gone")
    if not (cancel or shown.done):
        why = ", ".join(f"{reason.lower()}: {count}" for reason, count in shown.reasons.items())
        reading = f", {shown.reading} are being read" if shown.reading else ""
        raise fail("drain", f"{shown.left} values are left{reading}; {why or 'the time is up'}", FAILED)


def _drained(store: Store, segment: int, timeout_s: float, as_json: bool) -> Drained:
    deadline_s = time.monotonic() + timeout_s
    shown = store.drain(segment, timeout_s=0.0)
    with progress(shown=not as_json) as bar:
        task = bar.add_task("drain", total=shown.left_bytes + shown.moved_bytes)
        while not (shown.done or shown.stuck) and (rest_s := deadline_s - time.monotonic()) > 0:
            shown = store.drain(segment, timeout_s=min(LOOK_S, rest_s))
            bar.update(task, completed=shown.moved_bytes)
    return shown


def _segment(store: Store, name: str) -> int:
    """The id of a segment by its name on the command line. Raises ConfigError."""
    try:
        return int(name, 16)
    except ValueError:
        pass  # an address
    found = [one.segment for one in store.report(0).segments if one.address == name]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} segments are lent from {name!r}; see `mooncake store top --once`")
    return found[0]
