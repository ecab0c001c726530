"""``hatch run sim --seeds 1000``: stores with random faults, simulated by seed; see simulated/__init__.py."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count, islice
from multiprocessing import get_context
from typing import Annotated

import typer
from mutations import MUTATIONS, first_to_find
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from simulated.faults import PAUSES
from simulated.run import Outcome, run_seed

console = Console()


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    faults: Annotated[
        int, typer.Option(min=0, help="Go on until so many faults were injected, short pauses not counted.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Run one seed again, and say what happened.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = len(os.sched_getaffinity(0)),
    keep_going: Annotated[bool, typer.Option(help="Go on after a seed that fails.")] = False,
    mutations: Annotated[bool, typer.Option(help="Break the store in several ways, and find each.")] = False,
) -> None:
    """Simulate stores with faults, one for each seed. Exits with 1 when a promise was broken."""
    if seed is not None:
        raise typer.Exit(_replay(seed))
    if mutations:
        raise typer.Exit(_mutate(first, seeds, jobs))
    failed, counts, ran = _run(first, None if faults else seeds, faults, jobs, keep_going=keep_going)
    _show(counts, ran)
    for outcome in failed:
        console.print(f"[red]seed {outcome.seed}[/]: {outcome.failure}", markup=True, highlight=False)
        console.print(f"  again: hatch run sim --seed {outcome.seed}", highlight=False)
    if not failed:
        paused = counts.total() - heavy(counts)
        console.print(
            f"{ran['seeds']} seeds, {heavy(counts)} faults and {paused} short pauses: every promise was kept"
        )
    raise typer.Exit(1 if failed else 0)


def _run(
    first: int, seeds: int | None, faults: int, jobs: int, *, keep_going: bool
) -> tuple[list[Outcome], Counter[str], Counter[str]]:
    counts: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    failed: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ProcessPoolExecutor(jobs, get_context("forkserver")) as pool,
    ):
        bar = progress.add_task("faults" if faults else "seeds", total=faults or seeds)
        for outcome in _outcomes(pool, first, seeds, jobs):
            counts += outcome.faults
            for name in ("calls", "reads", "ordered", "misses", "stored", "events"):
                ran[name] += getattr(outcome, name)
            ran["seeds"] += 1
            ran["virtual seconds"] += int(outcome.virtual_s)
            progress.update(bar, completed=heavy(counts) if faults else ran["seeds"])
            if outcome.failure:
                failed.append(outcome)
            if (failed and not keep_going) or (faults and heavy(counts) >= faults):
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return failed, counts, ran


def heavy(counts: Counter[str]) -> int:
    """Faults that are more than a short pause of one thread or connection."""
    return sum(number for kind, number in counts.items() if kind not in PAUSES)


def _outcomes(pool: ProcessPoolExecutor, first: int, seeds: int | None, jobs: int) -> Iterator[Outcome]:
    numbers = iter(islice(count(first), seeds))
    running: set[Future[Outcome]] = {pool.submit(run_seed, number) for number in islice(numbers, 2 * jobs)}
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        running |= {pool.submit(run_seed, number) for number in islice(numbers, len(done))}
        for future in done:
            yield future.result()


def _mutate(first: int, seeds: int, jobs: int) -> int:
    """Which seed finds each mutation; 1 when one is not found."""
    lost = 0
    with ProcessPoolExecutor(jobs, get_context("forkserver")) as pool:
        found = [(name, pool.submit(first_to_find, name, range(first, first + seeds))) for name in MUTATIONS]
        for name, future in found:
            outcome = future.result()
            lost += outcome is None
            said = (
                "not found" if outcome is None else f"seed {outcome.seed}: {outcome.failure.splitlines()[-1]}"
            )
            console.print(f"{name}: {said}", markup=False, highlight=False, soft_wrap=True)
    return 1 if lost else 0


def _show(counts: Counter[str], ran: Counter[str]) -> None:
    table = Table("fault", "injected", show_edge=False)
    for kind, number in counts.most_common():
        table.add_row(kind, str(number))
    console.print(table)
    console.print(", ".join(f"{number} {name}" for name, number in ran.items()), highlight=False)


def _replay(seed: int) -> int:
    outcome = run_seed(seed, notes=400)
    for line in outcome.notes:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    _show(outcome.faults, Counter())
    console.print(f"trace {outcome.trace:08x}", outcome.failure or "every promise was kept", markup=False)
    return 1 if outcome.failure else 0


if __name__ == "__main__":
    typer.run(simulate)
