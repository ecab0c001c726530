"""Measures one combination: posts prepared transfers from several threads and keeps every duration."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_transfer._errors import TransferError
from mooncake_transfer.bench.plan import WRITE, Point
from mooncake_transfer.engine import TransferEngine
from mooncake_transfer.region import Region, RemoteRegion

__all__ = ["BytesDiffer", "Result", "measure", "verify"]

WARM_CALLS = 3
LEAST_CALLS = 3
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)


class BytesDiffer(TransferError):
    """Bytes that were written and read back are not those that were written."""


class Result(msgspec.Struct, frozen=True):
    """What was found for one point.

    Attributes:
        calls: transfers that were made, by all threads.
        gb_per_s: bytes moved, in 1e9 bytes per second.
        transfers_per_s: transfers per second.
        p50_us, p90_us, p99_us, p999_us, max_us: from post to the end of the wait, in microseconds.
        cores: processors kept busy meanwhile, by both sides where both are on this host.
    """

    point: Point
    calls: int
    gb_per_s: float
    transfers_per_s: float
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float
    cores: float


def verify(engine: TransferEngine, local: Region, remote: RemoteRegion, point: Point) -> None:
    """Write random bytes as the point's transfers do, read them back and compare. Raises BytesDiffer."""
    memory = np.frombuffer(local.view(), dtype=np.uint8)
    for thread in range(point.threads):
        blocks = point.blocks(thread)
        memory[: point.region_bytes] = np.frombuffer(secrets.token_bytes(point.region_bytes), dtype=np.uint8)
        sent = _gather(memory, blocks)
        engine.write(local, remote, blocks).wait()
        memory[: point.region_bytes] = 0
        engine.read(local, remote, blocks).wait()
        wrong = np.flatnonzero(_gather(memory, blocks) != sent)
        if wrong.size:
            raise BytesDiffer(
                f"{wrong.size} of {sent.size} bytes came back changed over {point.driver} "
                f"({point.batch} x {point.size} bytes, the first at {wrong[0]}); do not use this path"
            )


def _gather(memory: npt.NDArray[np.uint8], blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return np.concatenate([memory[int(at) : int(at) + int(size)] for at, _, size in blocks])


def measure(
    engine: TransferEngine,
    local: Region,
    remote: RemoteRegion,
    point: Point,
    seconds: float,
    cpu_s: Callable[[], float] = time.process_time,
) -> Result:
    """Move the point's blocks for about ``seconds`` and say how it went. Raises what a transfer raises.

    ``cpu_s`` gives the processor time that everything taking part has used so far.
    """
    start = threading.Barrier(point.threads + 1)
    with ThreadPoolExecutor(point.threads, thread_name_prefix="mooncake-bench") as pool:
        runs = [
            pool.submit(_run, engine, local, remote, point, thread, seconds, start)
            for thread in range(point.threads)
        ]
        # A thread that failed while it warmed up breaks the barrier: its result below raises the reason.
        with contextlib.suppress(threading.BrokenBarrierError):
            start.wait(60 + seconds)
        before_s, started_s = cpu_s(), time.perf_counter()
        taken = np.concatenate([run.result() for run in runs])
        elapsed_s, used_s = time.perf_counter() - started_s, cpu_s() - before_s
    p50_us, p90_us, p99_us, p999_us, max_us = (
        float(found) / 1e3 for found in np.percentile(taken, PERCENTILES)
    )
    return Result(
        point,
        len(taken),
        len(taken) * point.nbytes / elapsed_s / 1e9,
        len(taken) / elapsed_s,
        p50_us,
        p90_us,
        p99_us,
        p999_us,
        max_us,
        used_s / elapsed_s,
    )


def _run(
    engine: TransferEngine,
    local: Region,
    remote: RemoteRegion,
    point: Point,
    thread: int,
    seconds: float,
    start: threading.Barrier,
) -> npt.NDArray[np.int64]:
    try:
        prepare = engine.prepare_write if point.op == WRITE else engine.prepare_read
        transfer = prepare(local, remote, point.blocks(thread))
        for _ in range(WARM_CALLS):
            transfer.post()
            transfer.wait()
        start.wait(60)
    except BaseException:
        start.abort()
        raise
    clock, taken = time.perf_counter_ns, list[int]()
    now = clock()
    end = now + int(seconds * 1e9)
    while now < end or len(taken) < LEAST_CALLS:
        began = clock()
        transfer.post()
        transfer.wait()
        now = clock()
        taken.append(now - began)
    return np.array(taken, dtype=np.int64)
