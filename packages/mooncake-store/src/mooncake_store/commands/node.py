"""``mooncake store node``: lends memory of this machine to a store."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from mooncake_store._errors import ConfigError, MasterError, StoreError
from mooncake_store.client import Store
from mooncake_store.commands.session import MasterAddress, TokenFile, checked
from mooncake_store.config import StoreConfig
from mooncake_store.tiers.config import read_tiers
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.bench.plan import parse_size
from mooncake_transfer.process import announce_ready, configure_logging, watch_lifeline

__all__ = ["node"]

REPORT_INTERVAL_S = 30.0
# Masters and nodes are often started together.
CONNECT_TIMEOUT_S = 20.0

log = logging.getLogger("mooncake_store.node")


@checked
def node(
    lend: Annotated[str, typer.Option(help="Memory to lend, such as 64G or 512M.")],
    master: MasterAddress = "",
    host: Annotated[str, typer.Option(help="Address to listen on, and to be known by.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 0,
    numa_node: Annotated[int | None, typer.Option(help="Take the memory of this NUMA node.")] = None,
    token_file: TokenFile = "",
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve metrics for Prometheus on this port of --host; 0 takes any free one."),
    ] = None,
    tiers: Annotated[
        Path | None, typer.Option(help="Keep values beyond memory as the [[tier]] tables of this file say.")
    ] = None,
    kv_events: Annotated[
        str, typer.Option(help="Publish KV events of the segment at this ZMQ endpoint: tcp://*:5557.")
    ] = "",
    kv_events_replay: Annotated[
        str, typer.Option(help="Answer requests for events that were missed at this ZMQ endpoint.")
    ] = "tcp://127.0.0.1:*",
    drain_s: Annotated[
        float,
        typer.Option(
            help="Told to end, take so long at most to copy values to other nodes; 0: leave at once."
        ),
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ready_fd: Annotated[int | None, typer.Option(help='Write {"address": ...} here when ready.')] = None,
    lifeline_fd: Annotated[int | None, typer.Option(help="End at once when this pipe is closed.")] = None,
) -> None:
    """Lend memory to a store until SIGTERM or SIGINT, without an engine of inference.

    Then it copies what lies there to other nodes, where there are any, and leaves. A second signal makes it
    leave at once.

    Exit status: 1 without such memory, 2 for wrong use, 3 when the store does not answer at the start.
    """
    configure_logging(log_level)
    watch_lifeline(lifeline_fd)
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if not master:
        raise ConfigError("no master was named; give --master or set MOONCAKE_STORE_MASTER")
    lend_bytes = parse_size(lend)
    config = StoreConfig(
        numa_node=numa_node,
        token_file=token_file,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        tiers=read_tiers(tiers) if tiers is not None else (),
    )
    with ExitStack() as stack:
        engine = stack.enter_context(TransferEngine(TransferConfig.load(host=host, port=port)))
        store = stack.enter_context(Store(engine, master, lend_bytes=lend_bytes, config=config))
        ready: dict[str, object] = {"address": engine.address}
        if kv_events:
            ready |= _publish_events(stack, store, kv_events, kv_events_replay)
        if metrics_port is not None:
            ready["metrics"] = _serve_metrics(stack, store, host, metrics_port)
        log.info("ready address=%s lends_bytes=%d", engine.address, lend_bytes)
        announce_ready(ready_fd, ready)
        while not stop.wait(REPORT_INTERVAL_S):
            _report(store)
        if drain_s > 0:
            _drain(store, drain_s, hurry)
        log.info("stopping")
        store.close(hurry=hurry)
    log.info("stopped")


def _drain(store: Store, drain_s: float, hurry: threading.Event) -> None:
    try:
        shown = store.drain(timeout_s=drain_s, stop=hurry)
    except StoreError as error:
        log.warning("the values here are not copied to other nodes: %s", error)
        return
    level = logging.INFO if shown.done else logging.WARNING
    numbers = ("done", "moved", "moved_bytes", "gone", "left", "reading", "reasons")
    log.log(level, "drained %s", " ".join(f"{name}={getattr(shown, name)}" for name in numbers))


def _publish_events(stack: ExitStack, store: Store, endpoint: str, replay: str) -> dict[str, object]:
    """Publish KV events of the store's segment until the stack ends; returns where."""
    try:
        publishing = import_module("mooncake_store.kv_events.publisher")
        segment = import_module("mooncake_store.kv_events.segment")
    except ImportError as error:
        raise ConfigError(f'--kv-events: {error}; pip install "mooncake-store[events]"') from error
    publisher = publishing.KVEventPublisher(endpoint, replay)
    stack.callback(publisher.close)
    stack.callback(store.close)  # before the publisher: its last events are of the store
    segment.SegmentEvents(store, publisher)
    return {"kv_events": publisher.endpoint, "kv_events_replay": publisher.replay_endpoint}


def _serve_metrics(stack: ExitStack, store: Store, host: str, port: int) -> str:
    """Serve the numbers of a store client and its engine until the stack ends; returns the URL."""
    try:
        of_store, of_engine = (import_module(f"mooncake_{name}.metrics") for name in ("store", "transfer"))
    except ImportError as error:
        raise ConfigError(f'--metrics-port: {error}; pip install "mooncake-store[metrics]"') from error
    collectors = [of_store.StoreCollector(store), of_engine.EngineCollector(store.engine)]
    server = of_engine.MetricsServer(collectors, host, port)
    stack.callback(server.close)
    return f"http://{server.address}/metrics"


def _report(store: Store) -> None:
    try:
        stats = store.stats()
    except MasterError as error:
        log.warning("the master is away: %s", error)
    else:
        log.info("stats objects=%d used_bytes=%d", stats.objects, stats.used_bytes)
