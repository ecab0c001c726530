"""Reads of values from a file tier beside fio's reads of blocks as large, at equal depth, by turns."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rows import RATIO, Row, Target

from mooncake_store.tiers import FileTier, Read, ReadOutcome, Record, WriteOutcome
from mooncake_store.tiers.contract import Bytes
from mooncake_transfer import TransferEngine

__all__ = ["tier_rows"]

KIB, MIB = 1 << 10, 1 << 20
FILLED_BYTES = 512 * MIB
BUCKET_BYTES = FILLED_BYTES + FILLED_BYTES // 32
DEPTH = 32
LABELS = {"256 KiB": 256 * KIB, "1 MiB": MIB, "4 MiB": 4 * MIB}
SIZES = {f"file tier, reads of {label}, depth {DEPTH}": size for label, size in LABELS.items()}
BATCH_BYTES = 128 * MIB
LIMIT_S = 60.0
TARGET = Target(RATIO, at_least=0.9)


def tier_rows(wanted: Callable[[str], bool], folder: Path | None, *, quick: bool) -> Iterator[Row]:
    """One row for each size that is wanted; nothing is judged where fio is not installed."""
    sizes = {what: size for what, size in SIZES.items() if wanted(what)}
    with tempfile.TemporaryDirectory(dir=folder, prefix="mooncake-bench-") as place:
        for what, size in sizes.items():
            yield _row(Path(place) / str(size), what, size, quick=quick)


def _row(place: Path, what: str, size: int, *, quick: bool) -> Row:
    window_s, rounds = (0.3, 3) if quick else (1.0, 5)
    theirs, mine = [], []
    with TransferEngine() as engine, _filled(place, size) as tier:
        region = engine.allocate(min(BATCH_BYTES, FILLED_BYTES), huge_pages="transparent")
        memory = np.frombuffer(region.view(), dtype=np.uint8)
        tier.lend_memory(memory)
        _ours(tier, memory, size, window_s / 3)
        for _ in range(rounds):
            if shutil.which("fio") is not None:
                theirs.append(_fio(place, size, window_s))
            mine.append(_ours(tier, memory, size, window_s))
        tier.close()
    shutil.rmtree(place)
    return Row(
        "store",
        what,
        "MB/s",
        statistics.median(mine) / 1e6,
        "fio",
        statistics.median(theirs) / 1e6 if theirs else None,
        TARGET,
        {"spread": max(mine) / min(mine), "peer_spread": max(theirs) / min(theirs) if theirs else None},
    )


class _filled(FileTier):
    """A tier full of values of one size, as a context."""

    def __init__(self, folder: Path, size: int) -> None:
        # All in one file, which fio reads too: what the machine caches of it helps both.
        super().__init__(folder, 4 * BUCKET_BYTES, bucket_bytes=BUCKET_BYTES, in_flight=DEPTH)
        chunk = np.frombuffer(os.urandom(size), dtype=np.uint8)
        for first in range(0, FILLED_BYTES // size, 16):
            records = [Record(_digest(first + i), b"k", chunk) for i in range(16)]
            assert self.write(records, LIMIT_S) == [WriteOutcome.STORED] * 16

    def __enter__(self) -> _filled:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _ours(tier: FileTier, memory: Bytes, size: int, window_s: float) -> float:
    """Bytes a second of batches of random values, each compared with its checksum."""
    random = np.random.default_rng()
    count = memory.nbytes // size
    began, moved = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < window_s:
        numbers = random.integers(0, FILLED_BYTES // size, count).tolist()
        reads = [Read(_digest(n), memory[i * size : (i + 1) * size]) for i, n in enumerate(numbers)]
        assert tier.read(reads, LIMIT_S) == [ReadOutcome.GOOD] * count
        moved += count * size
    return moved / elapsed


def _fio(folder: Path, size: int, window_s: float) -> float:
    """Bytes a second of fio's io_uring engine over a bucket, with registered buffers and file."""
    (bucket,) = folder.glob("*.bucket")
    command = ["fio", "--name=bench", f"--filename={bucket}"]
    command += [f"--size={bucket.stat().st_size // size * size}"]
    command += ["--rw=randread", f"--bs={size}", f"--iodepth={DEPTH}", "--time_based"]
    command += [f"--runtime={round(1000 * window_s)}ms", "--direct=1", "--ioengine=io_uring"]
    command += ["--fixedbufs=1", "--registerfiles=1", "--randrepeat=0", "--norandommap=1"]
    command += ["--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])
