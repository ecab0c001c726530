"""What a driver's core costs by itself, over a double of its hardware: allocations, and instructions.

The engine posts the same prepared transfer again and again. What the driver's own object allocates is counted
by an allocator that is preloaded, and what it executes by callgrind; engine, double and Python are not in it.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from mooncake_transfer import Region, TransferConfig, TransferEngine
from mooncake_transfer.testing.compiling import compiled
from mooncake_transfer.testing.owner import make_device_memory

__all__ = ["Counted", "HotPath", "allocations", "instructions"]

HERE = Path(__file__).parent
DEADLINE_S = 60.0
RUN_S = 900.0
ROUNDS = 4


class HotPath(msgspec.Struct, frozen=True):
    """Batches of small writes, one after the other.

    Attributes:
        driver: its name; its package has ``_core``.
        options: of the driver.
        near, far: kinds of both sides' memory, as ``make_device_memory`` knows them; empty: the engine's.
        allocate_from: the driver that the engine's memory comes from, as in TransferConfig.
        batch: operations that are posted at a time.
        block_bytes: of each; between two is a gap, so that no driver makes one of them.
        warm_up: batches in which queues grow to their size.
        environment: of the process that runs them.
    """

    driver: str
    options: dict[str, str | int | float | bool]
    near: str = ""
    far: str = ""
    allocate_from: str = ""
    batch: int = 1024
    block_bytes: int = 64
    warm_up: int = 64
    environment: dict[str, str] = {}


class Counted(msgspec.Struct, frozen=True):
    """What the driver's core allocated: ``before`` the operations, and while they ran."""

    operations: int
    allocations: int
    before: int


def allocations(path: HotPath, batches: int) -> Counted:
    """Run so many batches in a process of its own, and count what the core allocates meanwhile.

    That it allocates anything ``before`` shows that the counter sees it.
    """
    source = HERE / "native/allocations.cpp"
    preloaded = compiled("allocations.so", [source], "-O2", "-shared", "-ldl")
    done = _run([], path, batches, {"LD_PRELOAD": str(preloaded)})
    return msgspec.json.decode(done.stdout, type=Counted)


def instructions(path: HotPath, batches: tuple[int, int]) -> float | None:
    """Instructions of the driver's core for one operation; None without callgrind.

    From two runs of so many batches: their difference has nothing of the start.
    """
    if not all(map(shutil.which, ("valgrind", "callgrind_annotate"))):
        return None
    counted = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile")
        under = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}"]
        for count in batches:
            _run(under, path, count, {})
            counted.append(_executed_by(_core(path.driver), profile))
    return (counted[1] - counted[0]) / ((batches[1] - batches[0]) * path.batch)


def _core(driver: str) -> str:
    return str(importlib.import_module(f"mooncake_driver_{driver}._core").__file__)


def _executed_by(core: str, profile: Path) -> int:
    command = ["callgrind_annotate", "--threshold=100", "--auto=no", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_S)
    # "1,234 (5.67%)  file:function [object]"
    lines = re.findall(r"^ *([\d,]+) \([^)]*\) .*\[(\S+)\]$", done.stdout, re.MULTILINE)
    return sum(int(number.replace(",", "")) for number, made_of in lines if made_of == core)


def _run(
    under: Sequence[str], path: HotPath, batches: int, more: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", __name__, msgspec.json.encode(path).decode(), str(batches)]
    environment = [f"{name}={value}" for name, value in {**path.environment, **more}.items()]
    command = ["env", *environment, *under, *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return done


def _counter(driver: str) -> Callable[[], int]:
    own = ctypes.CDLL(None)
    if not hasattr(own, "counted_allocations"):  # not preloaded: instructions are counted
        return lambda: 0
    own.counted_allocations.restype = ctypes.c_uint64
    own.count_allocations_of.restype = ctypes.c_bool
    assert own.count_allocations_of(_core(driver).encode()), _core(driver)
    return lambda: int(own.counted_allocations())


def _region(engine: TransferEngine, kind: str, nbytes: int) -> tuple[Region, object]:
    """A region, and what it has to be kept with."""
    if not kind:
        return engine.allocate(nbytes), None
    memory = make_device_memory(kind, nbytes)
    return engine.register(memory.source), memory


def main(described: str, batches: str) -> None:
    """Post batches, and write what was counted to standard output."""
    path = msgspec.json.decode(described, type=HotPath)
    count = _counter(path.driver)
    config = TransferConfig(
        drivers=(path.driver,),
        driver_options={path.driver: path.options},
        allocate_from=path.allocate_from,
    )
    stride = 2 * path.block_bytes
    with TransferEngine(config) as owner, TransferEngine(config) as user:
        far, _far_memory = _region(owner, path.far, path.batch * stride)
        near, _near_memory = _region(user, path.near, path.batch * stride)
        starts = np.arange(path.batch, dtype=np.uint64) * stride
        blocks = np.stack([starts, starts, np.full_like(starts, path.block_bytes)], axis=1)
        prepared = user.prepare_write(near, user.import_region(far.descriptor()), blocks)
        for _ in range(path.warm_up):
            prepared.post().wait(DEADLINE_S)
        # Where a thread had to wait for its core, it may still find a queue longer than ever before. What
        # allocates by operation does so in every round.
        for _ in range(ROUNDS):
            before = count()
            for _ in range(int(batches)):
                prepared.post().wait(DEADLINE_S)
            found = Counted(int(batches) * path.batch, count() - before, before)
            if not found.allocations:
                break
    sys.stdout.write(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
