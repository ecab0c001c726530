"""The commands of this package: ``mooncake worker``, and those of a whole cluster.

Nothing here imports torch before a command runs: ``mooncake --help`` stays quick.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.markup import escape

from mooncake_transfer.console import plain_console
from mooncake_transfer.hooks import hookimpl
from mooncake_transformers._errors import ConfigError, PortTaken, WorkerError
from mooncake_transformers.cluster.cli import register as register_cluster
from mooncake_transformers.config import CHOICES, WorkerConfig, calm_openmp, format_bytes, parse_bytes

if TYPE_CHECKING:
    from mooncake_transformers.worker import Worker

__all__ = ["mooncake_cli"]

CANNOT_START = 2
DEFAULTS = WorkerConfig()


@hookimpl
def mooncake_cli(app: typer.Typer) -> None:
    """Add ``worker`` and the cluster's commands to the ``mooncake`` program."""
    app.command("worker")(worker)
    register_cluster(app)


def worker(
    role: Annotated[
        str, typer.Option(help="Part of a request it is for: prefill, decode or both.")
    ] = DEFAULTS.role,
    model: Annotated[
        str, typer.Option(help="A folder, a hub id, or `default`: the model inside a wheel.")
    ] = DEFAULTS.model,
    served_name: Annotated[str, typer.Option(help="What clients call the model.")] = DEFAULTS.served_name,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="Torch device, for example cpu or cuda:0.")] = DEFAULTS.device,
    attention: Annotated[str, typer.Option(help="auto, eager or sdpa.")] = DEFAULTS.attention,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port of the HTTP API; 0 is any free one.")] = DEFAULTS.port,
    advertise_host: Annotated[
        str, typer.Option(help="What others reach this machine by, if --host is a wildcard.")
    ] = DEFAULTS.advertise_host,
    store: Annotated[
        str, typer.Option(help="Address of the store's master. Absent: one inside this process.")
    ] = "",
    lend: Annotated[
        str, typer.Option(help="Memory lent to the store. Default: 1GiB; 0 for --role decode.")
    ] = "",
    kv_pool: Annotated[str, typer.Option(help="Memory for prompts in flight.")] = format_bytes(
        DEFAULTS.kv_pool_bytes
    ),
    block_tokens: Annotated[int, typer.Option(help="Tokens in one KV block.")] = DEFAULTS.block_tokens,
    threads: Annotated[
        int, typer.Option(help="Threads to compute with; 0: one for each core.")
    ] = DEFAULTS.threads,
    driver: Annotated[
        list[str] | None, typer.Option(help="Transfer driver to use; repeat for more. Absent: all.")
    ] = None,
    store_decoded: Annotated[
        bool, typer.Option(help="Store the blocks of answers too, if memory is lent.")
    ] = DEFAULTS.store_decoded,
    handoff_deadline: Annotated[
        float, typer.Option(help="Seconds a prompt is held for a decode worker.")
    ] = DEFAULTS.handoff_deadline_s,
    pool_wait: Annotated[
        float, typer.Option(help="Seconds a request waits for KV blocks.")
    ] = DEFAULTS.pool_wait_s,
    max_running: Annotated[
        int, typer.Option(help="Answers decoded at the same time.")
    ] = DEFAULTS.max_running,
    ready_fd: Annotated[int | None, typer.Option(help="Write the URL to this descriptor when ready.")] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="End when this descriptor reaches its end.")] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Serve one model in one role until Ctrl-C.

    Ends with status 2 when it cannot start: unknown model, port taken, no memory, no master.
    """
    from mooncake_transfer.process import announce_ready, watch_lifeline

    watch_lifeline(lifeline_fd)
    _log_at(log_level)
    options = {
        "role": role, "model": model, "served_name": served_name, "dtype": dtype, "device": device,
        "attention": attention, "host": host, "port": port, "advertise_host": advertise_host,
        "store": store or None, "block_tokens": block_tokens, "threads": threads,
        "drivers": tuple(driver) if driver else None, "store_decoded": store_decoded,
        "handoff_deadline_s": handoff_deadline, "pool_wait_s": pool_wait, "max_running": max_running,
    }  # fmt: skip
    served = _open_worker(options, lend, kv_pool)
    message: dict[str, object] = {
        "url": served.url,
        "engine_id": served.engine_id,
        "address": served.engine.address,
    }
    asyncio.run(served.serve(lambda: announce_ready(ready_fd, message)))
    _end_process()


def _end_process() -> NoReturn:
    """End at once, with status 0. Everything of ours is closed by now; unloading torch would take seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _open_worker(options: dict[str, Any], lend: str, kv_pool: str) -> Worker:
    """The worker, or an error in one line and status 2."""
    calm_openmp()
    import msgspec

    from mooncake_store.errors import StoreError
    from mooncake_transfer.errors import TransferError
    from mooncake_transformers.worker import Worker

    try:
        options["lend_bytes"] = parse_bytes(lend) if lend else None
        options["kv_pool_bytes"] = parse_bytes(kv_pool)
        for name, words in CHOICES.items():
            # msgspec would name the value, not what to write instead.
            if options[name] not in words:
                raise ConfigError(f"{name} is {options[name]!r}; it must be one of {', '.join(words)}")
        try:
            config = msgspec.convert(options, WorkerConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from error
        return Worker(config)
    except (WorkerError, StoreError, TransferError) as error:
        raise _cannot_start(error) from None


def _log_at(level: str) -> None:
    from mooncake_transfer.errors import ConfigError as TransferConfigError
    from mooncake_transfer.process import configure_logging

    try:
        configure_logging(level)
    except TransferConfigError as error:
        raise _cannot_start(error) from None


def _cannot_start(error: Exception) -> typer.Exit:
    """Say why in one line, and give what to raise."""
    kind = "" if isinstance(error, PortTaken) else f"{type(error).__name__}: "
    plain_console(stderr=True).print(f"[bold red]error:[/] {kind}{escape(str(error))}", soft_wrap=True)
    return typer.Exit(CANNOT_START)
