"""``mooncake store put``, ``get``, ``stat``, ``rm`` and the like: values, by a command each."""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import typer

from mooncake_store._errors import (
    ConfigError,
    KeyExists,
    KeyNotFound,
    LeaseExpired,
    PutFailed,
    QuotaExceeded,
    RateLimited,
    StoreFull,
)
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
from mooncake_store.keys import shown_key
from mooncake_store.policy import PutPolicy

__all__ = ["end_session", "get", "ls", "pin", "put", "rm", "stat"]

CHUNK_BYTES = 8 << 20
RATE_WAIT_S = 30.0  # for each value, when the tenant may not put that fast
STDIN = Path("-")
IfExistsOption = Literal["error", "keep", "replace"]


@checked
def put(
    files: Annotated[
        list[Path], typer.Argument(help="Files, and directories with all in them; - is standard input.")
    ],
    master: MasterAddress = "",
    key: Annotated[str, typer.Option(help="Key of the one value; else the file's path is it.")] = "",
    prefix: Annotated[str, typer.Option(help="Goes before each key.")] = "",
    if_exists: Annotated[IfExistsOption, typer.Option(help="What a taken key means.")] = "error",
    replicas: Annotated[int, typer.Option(help="Copies, each with another owner.")] = 1,
    priority: Annotated[int, typer.Option(help="0 to 15; lower ones are evicted first.")] = 0,
    group: Annotated[str, typer.Option(help="What is evicted together.")] = "",
    session: Annotated[str, typer.Option(help="What `end-session` makes the first to go.")] = "",
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
    as_json: AsJson = False,
) -> None:
    """Store files as values. `pin` keeps them from being evicted.

    Exit status: 1 when something was not stored, 2 for wrong use, 3 when the store does not answer.
    """
    policy = PutPolicy(replicas=replicas, priority=priority, group=group, session=session)
    values = list(_values(files, key, prefix))
    done: list[dict[str, object]] = []
    with client_of(master, tenant, token_file) as store, progress(shown=not as_json) as bar:
        task = bar.add_task("put", total=sum(path.stat().st_size for _, path in values if path != STDIN))
        for name, path in values:
            with _contents(path) as data:
                nbytes = len(data)
                failure = _put_one(store, as_key(name, in_hex), data, if_exists, policy)
            done.append({"key": name, "bytes": nbytes, "error": failure})
            bar.advance(task, nbytes)
    if as_json:
        print_json(done)
    failures = [f"{one['key']}: {one['error']}" for one in done if one["error"]]
    if failures:
        raise fail("put", f"{len(failures)} of {len(done)} not stored; {failures[0]}", FAILED)


def _put_one(store: Store, key: bytes, data: memoryview, if_exists: IfExistsOption, policy: PutPolicy) -> str:
    """Why it was not stored, empty when it was. Waits for as long as the tenant's rate asks for."""
    until_s = time.monotonic() + RATE_WAIT_S
    while True:
        try:
            store.put(key, data, if_exists=if_exists, policy=policy)
            return ""
        except RateLimited as error:
            if time.monotonic() + error.retry_after_s > until_s:
                return str(error)
            time.sleep(error.retry_after_s)
        except (KeyExists, StoreFull, PutFailed, QuotaExceeded) as error:
            return str(error)


def _values(files: list[Path], key: str, prefix: str) -> Iterator[tuple[str, Path]]:
    for file in files:
        if file != STDIN and file.is_dir():
            inside = sorted(path for path in file.rglob("*") if path.is_file())
            if key:
                raise ConfigError(f"--key names one value, and {file} is a directory; use --prefix")
            for path in inside:
                yield f"{prefix}{path.relative_to(file).as_posix()}", path
        elif key and len(files) > 1:
            raise ConfigError(f"--key names one value, and there are {len(files)} files; use --prefix")
        elif file == STDIN and not key:
            raise ConfigError("a value from standard input needs --key")
        elif file != STDIN and not file.is_file():
            raise ConfigError(f"{file} is no file that can be read")
        else:
            yield f"{prefix}{key or file.as_posix()}", file


@contextmanager
def _contents(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, which are read when they are needed."""
    if path == STDIN:
        yield memoryview(sys.stdin.buffer.read())
    elif path.stat().st_size == 0:
        yield memoryview(b"")
    else:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            yield view


@checked
def get(
    keys: Annotated[list[str], typer.Argument(help="Keys of the values.")],
    master: MasterAddress = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File of the value; of several keys, a directory for one file each."
        ),
    ] = None,
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
) -> None:
    """Read values into files, or one to standard output.

    Nothing is left of a file whose value did not arrive whole. Exit status: 1 when a key is not there or
    its lease ended twice while it was read, 2 for wrong use, 3 when the store does not answer.
    """
    if len(keys) > 1 and output is None:
        raise ConfigError(f"{len(keys)} keys need --output DIRECTORY")
    missing = []
    with client_of(master, tenant, token_file) as store, progress(shown=output is not None) as bar:
        task = bar.add_task("get", total=None)
        for name in keys:
            try:
                for nbytes in _get_one(store, as_key(name, in_hex), _place(output, name, many=len(keys) > 1)):
                    bar.advance(task, nbytes)
            except (KeyNotFound, LeaseExpired) as error:
                missing.append(str(error))
    if missing:
        raise fail("get", f"{len(missing)} of {len(keys)} not read; {missing[0]}", FAILED)


def _place(output: Path | None, name: str, *, many: bool) -> Path | None:
    if output is None or not (many or output.is_dir()):
        return output
    place = output / name
    if not place.resolve().is_relative_to(output.resolve()):
        raise ConfigError(f"key {name!r:.80} leads out of {output}; read it alone, with a file as --output")
    return place


def _get_one(store: Store, key: bytes, place: Path | None) -> Iterator[int]:
    reader = store.open_value(key)
    partial = None if place is None else place.with_name(place.name + ".partial")
    try:
        with _sink(partial) as sink:
            for start in range(0, reader.nbytes, CHUNK_BYTES):
                sink.write(reader.read(start, min(CHUNK_BYTES, reader.nbytes - start)))
                yield min(CHUNK_BYTES, reader.nbytes - start)
        reader.close()
        if partial is not None and place is not None:
            partial.replace(place)
    finally:
        reader.give_up()
        if partial is not None:
            partial.unlink(missing_ok=True)


@contextmanager
def _sink(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            yield file


@checked
def stat(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys; without any, the store's numbers.")] = None,
    master: MasterAddress = "",
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
    as_json: AsJson = False,
) -> None:
    """Show the sizes of values, or the numbers of the whole store.

    Exit status: 1 when a key is not there, 2 for wrong use, 3 when the store does not answer.
    """
    with client_of(master, tenant, token_file) as store:
        if not keys:
            stats = store.stats()
            numbers = {name: getattr(stats, name) for name in stats.__struct_fields__}
            return print_json(numbers) if as_json else _print_rows(numbers)
        found = store.batch_size([as_key(name, in_hex) for name in keys])
    sizes = dict(zip(keys, found, strict=True))
    if as_json:
        print_json([{"key": name, "bytes": size} for name, size in sizes.items()])
    else:
        _print_rows({name: "not there" if size is None else size for name, size in sizes.items()})
    if None in sizes.values():
        raise typer.Exit(FAILED)


def _print_rows(rows: dict[str, object]) -> None:
    widest = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:{widest}}  {value}")


@checked
def ls(
    pattern: Annotated[str, typer.Argument(help="Regular expression that is found in the key.")] = "",
    master: MasterAddress = "",
    prefix: Annotated[str, typer.Option(help="What the key begins with; cheaper than a pattern.")] = "",
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: Annotated[bool, typer.Option("--hex", help="Show keys in hexadecimal.")] = False,
    as_json: AsJson = False,
) -> None:
    """List keys and the sizes of their values.

    Exit status: 1 when a node that holds values does not answer, 2 for wrong use, 3 when the store does not.
    """
    with client_of(master, tenant, token_file) as store:
        found = sorted(store.ls(pattern, prefix=prefix))
    if as_json:
        return print_json(
            [{"key": shown_key(key), "key_hex": key.hex(), "bytes": nbytes} for key, nbytes in found]
        )
    widest = max((len(str(nbytes)) for _, nbytes in found), default=0)
    for key, nbytes in found:
        typer.echo(f"{nbytes:{widest}}  {key.hex() if in_hex else key.decode(errors='backslashreplace')}")
    return None


@checked
def pin(
    keys: Annotated[list[str], typer.Argument(help="Keys of the values.")],
    master: MasterAddress = "",
    soft_s: Annotated[
        float | None, typer.Option(help="For so many seconds, and only while others can go; else for good.")
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="End pins instead.")] = False,
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
) -> None:
    """Keep values from being evicted, or let them be evicted again.

    Exit status: 1 when a key is not there (the others are pinned), 2 for wrong use, 3 when the store does not
    answer.
    """
    if release and soft_s is not None:
        raise ConfigError("--soft-s and --release exclude each other")
    wanted = [as_key(name, in_hex) for name in keys]
    with client_of(master, tenant, token_file) as store:
        found = store.batch_unpin(wanted) if release else store.batch_pin(wanted, soft_s=soft_s)
    missing = [name for name, there in zip(keys, found, strict=True) if not there]
    if missing:
        reason = f"{len(missing)} of {len(keys)} are not there, the first is {missing[0]!r:.80}"
        raise fail("pin", reason, FAILED)


@checked
def end_session(
    session: Annotated[str, typer.Argument(help="Its name, as `put --session` or a PutPolicy gave it.")],
    master: MasterAddress = "",
    tenant: Tenant = "",
    token_file: TokenFile = "",
    as_json: AsJson = False,
) -> None:
    """Let the values of a session be the first to go.

    Exit status: 2 for wrong use, 3 when the store does not answer.
    """
    with client_of(master, tenant, token_file) as store:
        count = store.end_session(session)
    print_json({"values": count}) if as_json else typer.echo(f"{count} values are the first to go")


@checked
def rm(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys of the values.")] = None,
    master: MasterAddress = "",
    regex: Annotated[str, typer.Option(help="Values whose keys match this regular expression.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Every value of the tenant.")] = False,
    tenant: Tenant = "",
    token_file: TokenFile = "",
    in_hex: KeyEncoding = False,
    as_json: AsJson = False,
) -> None:
    """Remove values.

    Exit status: 1 when a key was not there (the others are removed), 2 for wrong use, 3 when the store does
    not answer.
    """
    if bool(keys) + bool(regex) + every != 1:
        raise ConfigError("give keys, or --regex, or --all")
    keys = keys or []
    with client_of(master, tenant, token_file) as store:
        if every or regex:
            count = store.remove_all() if every else store.remove_by_regex(regex)
            return print_json({"removed": count}) if as_json else typer.echo(f"{count} removed")
        removed = store.batch_remove([as_key(name, in_hex) for name in keys])
    if as_json:
        print_json([{"key": name, "removed": gone} for name, gone in zip(keys, removed, strict=True)])
    missing = [name for name, gone in zip(keys, removed, strict=True) if not gone]
    if missing:
        raise fail(
            "rm", f"{len(missing)} of {len(keys)} were not there, the first is {missing[0]!r:.80}", FAILED
        )
