"""``hatch run bench ep``: the process group's collectives in turns with gloo, and a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from contestant import Contestant, ContestantFailed
from ep.experts import dispatch_rows, placement_rows
from rich.console import Console
from rows import RATIO, VALUE, Row, Target, show, write_json, write_markdown
from transfer.rounds import Findings, Pace, measure

__all__ = ["ep"]

AGENT = Path(__file__).parents[1] / "agents" / "ep_ranks.py"
HOSTS = Path(__file__).parents[3] / "packages" / "mooncake-ep" / "tests" / "pg" / "hosts.py"
KIB, MIB = 1 << 10, 1 << 20
OURS, GLOO, COPY = "ours", "gloo", "copies"


@dataclasses.dataclass(frozen=True)
class Collective:
    """What is measured: a collective, and the bytes of the larger side of a rank."""

    op: str
    size: int

    def __str__(self) -> str:
        unit = f"{self.size // MIB} MiB" if self.size >= MIB else f"{self.size // KIB} KiB"
        return f"{self.op} {unit if self.size >= KIB else f'{self.size} B'}"


# Microseconds that the issue of 2 ranks allows, and our part of gloo's time.
SHORT = {8: (4.0, 1 / 15), 64 * KIB: (11.0, 1 / 10), MIB: (100.0, 1 / 6)}
LONG = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
LONG_BYTES = 64 * MIB
CALL = Collective("call", 8)


def agent(backend: str, world: int, namespaces: Sequence[str] = ()) -> Contestant:
    """Start the ranks of a backend; between the hosts that the namespaces stand for."""
    where = ["--namespaces", *namespaces] if namespaces else []
    return Contestant(
        f"{backend}, {world} ranks",
        [sys.executable, str(AGENT), "--backend", backend, "--world", str(world), *where],
        stop_between_turns=True,
    )


@contextlib.contextmanager
def contestants(
    world: int, console: Console, namespaces: Sequence[str] = ()
) -> Iterator[dict[str, Contestant]]:
    """Both backends with so many ranks; a backend that does not start is left out."""
    running: dict[str, Contestant] = {}
    for name, backend in ((OURS, "mooncake"), (GLOO, "gloo")):
        try:
            running[name] = agent(backend, world, namespaces)
        except ContestantFailed as failure:
            console.print(f"absent: {failure}", markup=False)
    try:
        yield running
    finally:
        for contestant in running.values():
            contestant.close()


def short_rows(world: int, findings: Findings) -> list[Row]:
    """All-reduces of one or a few lines: microseconds."""
    rows = []
    for size, (most_us, part) in SHORT.items():
        collective = Collective("all_reduce", size)
        ours = findings.medians.get((collective, OURS), {})
        theirs = findings.medians.get((collective, GLOO), {})
        what = f"{collective}, {world} ranks"
        details = {"ours_p99_us": ours.get("p99_us"), "peer_p99_us": theirs.get("p99_us")}
        details["ours_others_cores"] = ours.get("others", 0.0)
        mine, peer = ours.get("p50_us"), theirs.get("p50_us")
        rows.append(Row("ep", what, "us", mine, GLOO, peer, Target(RATIO, at_most=round(part, 4)), details))
        if world == 2:
            rows.append(Row("ep", f"{what}, itself", "us", mine, target=Target(VALUE, at_most=most_us)))
    return rows


def long_rows(world: int, findings: Findings) -> list[Row]:
    """64 MiB: GB/s of a rank, beside gloo's and beside copies of as many bytes by all ranks at once."""
    rows = []

    def rate(collective: Collective, name: str) -> float | None:
        found = findings.medians.get((collective, name))
        return None if found is None else collective.size / found["p50_us"] / 1e3

    bound = rate(Collective("copy", LONG_BYTES), OURS)
    for op in LONG:
        collective = Collective(op, LONG_BYTES)
        ours = rate(collective, OURS)
        what = f"{collective}, {world} ranks"
        rows.append(Row("ep", what, "GB/s", ours, GLOO, rate(collective, GLOO), Target(RATIO, at_least=3.0)))
        rows.append(Row("ep", what, "GB/s", ours, COPY, bound, Target(RATIO, at_least=0.7)))
    return rows


def kill_row(count: int, namespaces: Sequence[str] = ()) -> Row:
    """How soon two of three ranks go on when the third is killed."""
    killer = agent("mooncake", 0)
    try:
        found: Any = killer.ask("kills", world=3, size=64 * KIB, count=count, namespaces=list(namespaces))
    finally:
        killer.close()
    times = found["ms"]
    worst = times[min(len(times) - 1, len(times) * 99 // 100)]
    details = {"p50_ms": times[len(times) // 2], "kills": count}
    what = f"kill -9 of 1 of 3 ranks{' between hosts' if namespaces else ''}, p99 of {count}"
    most = 1000.0 if namespaces else 100.0
    return Row("ep", what, "ms", worst, target=Target(VALUE, at_most=most), details=details)


def host_rows(quick: bool, console: Console) -> list[Row]:
    """All-reduces and a kill between two hosts, which are network namespaces."""
    what, rows = Collective("all_reduce", LONG_BYTES), []
    pace = Pace(3, 0.2, 20.0) if quick else Pace(9, 0.5, 60.0)
    hosts = runpy.run_path(str(HOSTS))
    try:
        with hosts["two_hosts"]() as namespaces:
            for world in (2, 4):
                with contestants(world, console, namespaces) as running:
                    found = measure({what: (OURS, GLOO)}, running, pace, [], lambda _: None).medians
                ours, theirs = (
                    found[what, name]["p50_us"] / 1e3 if (what, name) in found else None
                    for name in (OURS, GLOO)
                )
                title = f"{what}, {world} ranks on 2 hosts"
                target = Target(RATIO, at_most=round(1 / 1.5, 4))
                rows.append(Row("ep", title, "ms", ours, GLOO, theirs, target))
            rows.append(kill_row(3 if quick else 20, namespaces))
    except hosts["NoHosts"] as reason:
        return [Row("ep", f"{what} on 2 hosts", "ms", None, details={"absent": str(reason)})]
    return rows


def measured(world: int, quick: bool, console: Console) -> list[Row]:
    """Rows of so many ranks."""
    pace = Pace(3, 0.2, 20.0) if quick else Pace(9, 0.3, 60.0)
    operations: dict[Any, Any] = {Collective("all_reduce", size): (OURS, GLOO) for size in SHORT}
    if not quick:
        operations |= {Collective(op, LONG_BYTES): (OURS, GLOO) for op in LONG}
        operations[Collective("copy", LONG_BYTES)] = (OURS,)
    with contestants(world, console) as running:
        findings = measure(operations, running, pace, [], lambda what: console.print(what, style="dim"))
    for failure in findings.failures.values():
        console.print(f"failed: {failure}", markup=False)
    return short_rows(world, findings) + ([] if quick else long_rows(world, findings))


def call_row() -> Row:
    """What our part of a call costs: a group of one rank has nobody to wait for."""
    alone = agent("mooncake", 1)
    try:
        found = alone.ask("measure", op=CALL.op, size=CALL.size, seconds=0.5)
    finally:
        alone.close()
    return Row("ep", "our part of a call, 1 rank", "us", found["p50_us"], target=Target(VALUE, at_most=2.0))


def ep(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows there.")] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Also write a table there.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="2 ranks, short collectives, 3 kills.")] = False,
) -> None:
    """Collectives of the process group in turns with gloo, 2 and 4 ranks; a call; and a kill."""
    console = Console()
    rows = [call_row(), kill_row(3 if quick else 50)]
    for world in (2,) if quick else (2, 4):
        rows += measured(world, quick, console)
        rows += dispatch_rows(world, quick)
    rows += host_rows(quick, console)
    rows += placement_rows()
    show(rows, console)
    if json_file is not None:
        write_json(rows, json_file)
    if markdown_file is not None:
        write_markdown(rows, markdown_file)
