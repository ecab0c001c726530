"""``hatch run bench nvmeof``: the nvmeof driver against fio, by turns on the same file at equal depth."""

from __future__ import annotations

import json as json_module
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rows import RATIO, Row, Target, show, write_json, write_markdown

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.memory import FileSource

BENCH = "nvmeof"
KIB, MIB = 1 << 10, 1 << 20
FILE_BYTES = 512 * MIB
SIZES = (4 * KIB, MIB)
DEPTHS, QUICK_DEPTHS = (1, 2, 4, 8, 16, 32), (1, 32)
FIO_LIMIT_S = 60.0
TARGET = Target(on=RATIO, at_least=0.95)


def fio(path: Path, way: str, size: int, depth: int, window_s: float) -> float:
    """Bytes a second of fio's io_uring engine, with registered buffers and file."""
    command = ["fio", "--name=bench", f"--filename={path}", f"--size={FILE_BYTES}", f"--rw=rand{way}"]
    command += [
        f"--bs={size}",
        f"--iodepth={depth}",
        f"--runtime={round(1000 * window_s)}ms",
        "--time_based",
        "--direct=1",
    ]
    command += ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", "--randrepeat=0"]
    command += ["--norandommap=1", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_LIMIT_S, check=True)
    return float(json_module.loads(done.stdout)["jobs"][0][way]["bw_bytes"])


def ours(path: Path, way: str, size: int, depth: int, window_s: float, expected: float) -> float:
    """Bytes a second of one transfer of random blocks that takes about ``window_s``."""
    options: dict[str, str | int | float | bool] = {"io": "io_uring", "in_flight": depth}
    config = TransferConfig(drivers=("nvmeof",), driver_options={"nvmeof": options})
    count = max(4 * depth, int(expected * window_s / size))
    random = np.random.default_rng()
    blocks = np.empty((count, 3), np.uint64)
    blocks[:, 0] = np.arange(count) % depth * size
    blocks[:, 1] = random.integers(0, FILE_BYTES // size, count) * size
    blocks[:, 2] = size
    with TransferEngine(config) as engine:
        memory = engine.allocate(depth * size, huge_pages="transparent")
        place = engine.import_region(engine.register(FileSource(path)).descriptor())
        prepare = engine.prepare_read if way == "read" else engine.prepare_write
        prepare(memory, place, blocks[: 4 * depth]).post().wait(FIO_LIMIT_S)
        transfer = prepare(memory, place, blocks)
        began = time.perf_counter()
        transfer.post().wait(FIO_LIMIT_S)
        return count * size / (time.perf_counter() - began)


def measured(path: Path, way: str, size: int, depth: int, *, quick: bool) -> Row:
    """One row: rounds of both by turns, and the medians."""
    window_s, rounds = (0.3, 3) if quick else (1.5, 5)
    theirs, mine = [], []
    for _ in range(rounds):
        theirs.append(fio(path, way, size, depth, window_s))
        mine.append(ours(path, way, size, depth, window_s, statistics.median(theirs)))
    label = "4 KiB" if size == 4 * KIB else "1 MiB"
    return Row(
        bench=BENCH,
        what=f"random {way}s of {label}, depth {depth}",
        unit="MB/s",
        ours=statistics.median(mine) / 1e6,
        peer="fio",
        peer_value=statistics.median(theirs) / 1e6,
        target=TARGET,
        details={"spread": max(mine) / min(mine), "peer_spread": max(theirs) / min(theirs)},
    )


def nvmeof(
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute; noisier figures.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the file of 512 MiB is made.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Rows whose name has this text; may be repeated.")
    ] = None,
) -> None:
    """Measure files by the nvmeof driver against fio, on the same file, direct I/O, at equal depth."""
    console = Console(width=None if os.isatty(1) else 190)
    rows: list[Row] = []
    if shutil.which("fio") is None:
        console.print("skipped: fio is not installed (Debian: apt-get install fio)")
        raise typer.Exit(0)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="mooncake-bench-") as file:
        block = os.urandom(MIB)
        for _ in range(FILE_BYTES // MIB):
            file.write(block)
        os.fsync(file.fileno())
        for way in ("read", "write"):
            for size in SIZES:
                for depth in QUICK_DEPTHS if quick else DEPTHS:
                    name = f"random {way}s of {'4 KiB' if size == 4 * KIB else '1 MiB'}, depth {depth}"
                    if not only or any(text.lower() in name.lower() for text in only):
                        rows.append(measured(Path(file.name), way, size, depth, quick=quick))
    if not rows:
        console.print("nothing matches --only; run without it to see the names of the rows")
        raise typer.Exit(2)
    show(rows, console)
    if json is not None:
        write_json(rows, json)
    if markdown is not None:
        write_markdown(rows, markdown)
