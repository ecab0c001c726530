"""``hatch run bench transfer``: the transfer engine against NIXL, upstream, gloo and a plain copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from contestant import Contestant
from rich.console import Console
from rows import Row, show, write_json, write_markdown
from spinners import BUSY, CONDITIONS, cores
from transfer import cases
from transfer.cases import Case, Operation
from transfer.contestants import LABELS, Start, started
from transfer.crowd import crowd_rows
from transfer.posting import posting_rows
from transfer.rounds import Findings, Pace, measure

BENCH = "transfer"
PACE = Pace(rounds=9, window_s=0.2, limit_s=30.0)
QUICK_PACE = Pace(rounds=3, window_s=0.06, limit_s=1.5)
CROWD_S, QUICK_CROWD_S = 60.0, 5.0
SHOWN = ("p50_us", "p99_us", "core_wait_us")


def transfer(
    context: typer.Context,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute; noisier figures.")] = False,
    without_peers: Annotated[
        bool, typer.Option("--without-peers", help="Only our own figures; nothing is installed.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Rows whose name has this text; may be repeated.")
    ] = None,
) -> None:
    """Measure the transfer engine against its peers, idle and with every core busy."""
    console = Console(width=None if os.isatty(1) else 190)
    wanted = _chosen(only or [])
    folder: Path | None = None if without_peers else context.obj
    pace = QUICK_PACE if quick else PACE
    rows: list[Row] = []
    with console.status("starting") as status:

        def progress(text: str) -> None:
            status.update(text)

        chosen = [case for case in [*cases.shm_cases(), *cases.tcp_cases()] if wanted(case.what)]
        chosen = [case for case in chosen if case.in_quick or not quick]
        rows += compared_rows(chosen, folder, pace, progress)
        rows += posting_rows(wanted, folder, 3 if quick else 7, progress)
        rows += crowd_rows(wanted, QUICK_CROWD_S if quick else CROWD_S, progress)
    show(rows, console)
    if json is not None:
        write_json(rows, json)
    if markdown is not None:
        write_markdown(rows, markdown)
    if not rows:
        console.print("nothing matches --only; run without it to see the names of the rows")
        raise typer.Exit(2)


def _chosen(only: Sequence[str]) -> Callable[[str], bool]:
    return lambda what: not only or any(text.lower() in what.lower() for text in only)


def compared_rows(
    chosen: Sequence[Case],
    folder: Path | None,
    pace: Pace,
    progress: Callable[[str], None],
    *,
    bench: str = BENCH,
    start: Start = started,
) -> list[Row]:
    """Measure cases in all their conditions, each beside its peers, which ``start`` starts."""
    names = dict.fromkeys(name for case in chosen for name in (case.ours, *case.peers))
    rows: dict[Case, list[Row]] = {case: [] for case in chosen}
    with start(names, folder, progress) as (contestants, absent):
        for condition in CONDITIONS:
            there = [case for case in chosen if condition in case.conditions]
            if there:
                findings = _in_condition(there, contestants, pace, condition, progress)
                for case in there:
                    rows[case] += _rows(bench, case, condition, findings, absent)
    return [row for case in chosen for row in rows[case]]


def _in_condition(
    there: Sequence[Case],
    contestants: dict[str, Contestant],
    pace: Pace,
    condition: str,
    progress: Callable[[str], None],
) -> Findings:
    operations: dict[Operation, list[str]] = {}
    # What shm does is compared with other peers than what tcp does: each has rounds of its own.
    findings = Findings()
    for ours in dict.fromkeys(case.ours for case in there):
        operations = {}
        for case in there:
            if case.ours == ours:
                names = operations.setdefault(case.operation, [ours])
                names += [name for name in case.peers if name not in names]
        with cores(condition) as spinner_pids:
            found = measure(
                operations,
                contestants,
                pace,
                spinner_pids,
                lambda text, ours=ours: progress(f"{condition}: {ours} {text}"),
            )
        findings.medians.update(found.medians)
        findings.failures.update(found.failures)
    return findings


def _rows(bench: str, case: Case, condition: str, findings: Findings, absent: dict[str, str]) -> list[Row]:
    mine = findings.medians.get((case.operation, case.ours))
    what = f"{case.what}, {'all cores busy' if condition == BUSY else condition}"
    rows = []
    for name, target in zip(case.peers, case.targets, strict=True):
        theirs = findings.medians.get((case.operation, name))
        details: dict[str, object] = {"condition": condition}
        for whose, found in (("ours", mine), ("peer", theirs)):
            if found is not None:
                details |= {f"{whose}_{key}": found[key] for key in SHOWN if key in found}
                details |= {f"{whose}_rounds": found["rounds"], f"{whose}_others_cores": found["others"]}
        for missing in (case.ours, name):
            reason = absent.get(missing) or findings.failures.get(missing)
            if reason and findings.medians.get((case.operation, missing)) is None:
                details["absent"] = reason
        rows.append(
            Row(
                bench,
                what,
                case.unit,
                None if mine is None else cases.value(case.unit, case.operation, mine),
                LABELS[name],
                None if theirs is None else cases.value(case.unit, case.operation, theirs),
                target if condition in case.target_in else None,
                details,
            )
        )
    return rows
