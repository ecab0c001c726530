"""``hatch run bench store``: how full the allocator gets, and how often each eviction policy hits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rows import RATIO, VALUE, Row, Target, show, write_json
from store.calls import call_rows
from store.failover import measure_failover
from store.fill import WORKLOADS, measure
from store.metadata import BATCH, measure_metadata
from store.replay import RULES, Requests, read_trace, replay_belady, replay_policy, replay_rule
from store.tiers import tier_rows

from mooncake_store import StoreConfig
from mooncake_store.eviction import find_eviction

__all__ = ["store"]

TRACES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
BESIDE = Path(__file__).parents[4] / "shared" / "traces"  # the default: a folder beside the repository
SOURCE = "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces (Apache-2.0)"
POLICIES = ("clock", "lru", "arc", "gdsf")
CAPACITIES = (3_000, 10_000, 30_000)
JUDGED = 10_000  # blocks, where the default has to beat the watermark by a tenth
STEPS, QUICK_STEPS = 32_000, 8_000
METADATA = "metadata of the master"
OBJECTS, QUICK_OBJECTS = 10_000_000, 1_000_000
FAILOVER_OBJECTS, QUICK_FAILOVER_OBJECTS = 1_000_000, 20_000


def store(
    context: typer.Context,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows there.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="10,000 blocks only; under a minute.")] = False,
    traces: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder with {' and '.join(TRACES.values())}, from {SOURCE}; else ../shared/traces, "
            "seen from the repository, where there is one."
        ),
    ] = None,
    without_peers: Annotated[
        bool, typer.Option("--without-peers", help="Only our own figures; nothing is installed.")
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the file tier's 512 MiB are made.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Calls, workloads and traces whose name contains this.")
    ] = None,
) -> None:
    """Time calls beside other stores, fill the allocator until something does not fit, replay traces."""
    console = Console(width=None if os.isatty(1) else 190)
    traces = traces or (BESIDE if BESIDE.is_dir() else None)
    texts = [text.lower() for text in only or [""]]
    peers = None if without_peers else context.obj
    with console.status("starting") as status:
        rows = call_rows(
            lambda what: any(text in what.lower() for text in texts), peers, quick, status.update
        )
    rows += [*_fills(QUICK_STEPS if quick else STEPS, only or [""])]
    if any(text in METADATA for text in texts):
        rows += _metadata(QUICK_OBJECTS if quick else OBJECTS)
    rows += tier_rows(lambda what: any(text in what.lower() for text in texts), folder, quick=quick)
    if any(text in "failover" for text in texts):
        rows += _failover_rows(QUICK_FAILOVER_OBJECTS if quick else FAILOVER_OBJECTS)
    for name, file in TRACES.items():
        if any(text in name for text in only or [""]):
            rows += _trace_rows(name, file, traces, (JUDGED,) if quick else CAPACITIES)
    if not rows:
        console.print(f"nothing matches {only}", markup=False)
        raise typer.Exit(2)
    show(rows, console)
    if json_file is not None:
        write_json(rows, json_file)


def _failover_rows(objects: int) -> Iterator[Row]:
    what = f"failover, {objects:,} objects"
    try:
        seen = measure_failover(objects)
    except FileNotFoundError as error:
        yield Row("store", what, "s", None, details={"absent": str(error)})
        return
    details = {"fill_s": seen.fill_s, "elected_s": seen.elected_s, "reads": seen.reads, "away": seen.away}
    target, all_s = Target(VALUE, at_most=2.0), seen.elected_s + seen.found_s
    yield Row("store", f"{what}, from kill -9 to all found", "s", all_s, target=target, details=details)
    yield Row("store", f"{what}, of that from election to all found", "s", seen.found_s, details=details)
    for name, count in (("missing", seen.missing), ("wrong", seen.wrong)):
        yield Row("store", f"{what}, {name}", "objects", float(count), target=Target(VALUE, at_most=0.0))


def _fills(steps: int, only: list[str]) -> Iterator[Row]:
    for workload in WORKLOADS:
        if not any(text in workload.name for text in only):
            continue
        fill = measure(workload, steps)
        details = {
            "least": fill.least,
            "failures": fill.failures,
            "us_per_allocation": fill.us_per_allocation,
        }
        target = Target(VALUE, at_least=workload.at_least)
        yield Row("store", f"fill, {workload.name}", "%", fill.mean, target=target, details=details)


def _metadata(objects: int) -> Iterator[Row]:
    found = measure_metadata(objects)
    million = Target(VALUE, at_least=1.0)
    # An operation is one of these on one key.
    for what, rate in (
        ("locate and release, each counted", 2 * found.locate_release),
        ("exist", found.exist),
        ("reserve and commit, each counted", 2 * found.reserve_commit),
        ("locate and release, each counted, over the channel", 2 * found.over_channel),
    ):
        details = {"batch": BATCH, "objects": found.objects, "thread": 1}
        yield Row(
            "store", f"{METADATA}, {what}", "M operations/s", rate / 1e6, target=million, details=details
        )
    what, resident = f"{METADATA}, {found.objects:,} objects", found.bytes_per_object
    yield Row("store", what, "B/object", resident, target=Target(VALUE, at_most=80.0))


def _trace_rows(name: str, file: str, traces: Path | None, capacities: tuple[int, ...]) -> Iterator[Row]:
    if traces is None or not (traces / file).is_file():
        nowhere = "no --traces, and no ../shared/traces beside the repository"
        where = nowhere if traces is None else f"{traces} has no {file}"
        yield Row("store", f"hits, {name}", "%", None, details={"absent": f"{where}; it comes from {SOURCE}"})
        return
    requests = read_trace(traces / file)
    for capacity in capacities:
        yield from _hits(name, requests, capacity)


def _hits(name: str, requests: Requests, capacity: int) -> Iterator[Row]:
    what = f"hits, {name}, {capacity:,} blocks"
    by_rule = {rule: replay_rule(requests, capacity, room) for rule, room in RULES.items()}
    by_rule["Belady"] = replay_belady(requests, capacity)
    lru, watermark, belady = by_rule
    for policy in POLICIES:
        found = replay_policy(requests, capacity, find_eviction(policy).make())
        default = policy == StoreConfig().eviction
        at_least = Target(RATIO, at_least=1.0) if default else None
        yield Row("store", f"{what}, {policy}", "%", found, lru, by_rule[lru], at_least)
        if default:
            tenth = Target(RATIO, at_least=1.1) if capacity == JUDGED else None
            yield Row("store", f"{what}, {policy}", "%", found, watermark, by_rule[watermark], tenth)
            yield Row("store", f"{what}, {policy}", "%", found, belady, by_rule[belady])
