"""``hatch run bench cxl``: the driver cxl over a pool in a file of main memory, against a plain copy."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rows import show, write_json
from transfer import cases
from transfer.command import PACE, QUICK_PACE, compared_rows
from transfer.contestants import started

from mooncake_driver_cxl import Pool

POOL_BYTES = 256 << 20
MAIN_MEMORY = "/dev/shm"


def cxl(
    context: typer.Context,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute; noisier figures.")] = False,
    without_peers: Annotated[
        bool, typer.Option("--without-peers", help="Only our own figures; nothing is installed.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Rows whose name has this text; may be repeated.")
    ] = None,
    folder: Annotated[
        str, typer.Option(help="Where the pool lies: tmpfs, hugetlbfs, or a file system with dax.")
    ] = MAIN_MEMORY,
) -> None:
    """Measure copies to and from a pool, between two processes."""
    console = Console(width=None if os.isatty(1) else 190)
    texts = [text.lower() for text in only or []]
    chosen = [
        case for case in cases.cxl_cases() if not texts or any(text in case.what.lower() for text in texts)
    ]
    if not chosen:
        console.print("nothing matches --only; run without it to see the names of the rows")
        raise typer.Exit(2)
    with (
        tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=folder) as place,
        console.status("") as status,
    ):
        path = f"{place}/pool"
        pool = Pool.open(path, create=True, size_bytes=POOL_BYTES)
        rows = compared_rows(
            chosen,
            None if without_peers else context.obj,
            QUICK_PACE if quick else PACE,
            status.update,
            bench="cxl",
            start=functools.partial(started, pool=path),
        )
        del pool
    show(rows, console)
    if json is not None:
        write_json(rows, json)
