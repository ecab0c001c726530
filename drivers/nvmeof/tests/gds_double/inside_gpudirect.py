"""Runs in a process that finds the double as libcuda and libcufile: GPU memory and files, one JSON a line."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_transfer import RailConfig, TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError
from mooncake_transfer.memory import FileSource, MemoryRange
from mooncake_transfer.testing import pattern

DEADLINE_S = 20.0
KIB, MIB = 1 << 10, 1 << 20
SIZE = 4 * MIB
double = ctypes.CDLL("libcufile.so.0")
double.gds_double_allocate.restype = double.gds_double_count.restype = ctypes.c_uint64
double.gds_double_allocate.argtypes = double.gds_double_move_at_most.argtypes = [ctypes.c_size_t]
double.gds_double_bytes.restype, double.gds_double_bytes.argtypes = ctypes.c_void_p, [ctypes.c_uint64]
double.gds_double_violations.restype = ctypes.c_char_p
double.gds_double_enter.argtypes = double.gds_double_is_in.argtypes = [ctypes.c_void_p]
double.gds_double_is_in.restype = ctypes.c_bool
double.gds_double_disturb_batches.argtypes = [ctypes.c_bool, ctypes.c_bool]
COUNTS = ("buffers", "handles", "contexts", "singles", "batched", "cancels")
OWN_CONTEXT = 0x1000  # of the application, which uses CUDA too


def say(**facts: Any) -> None:
    """One line for the test."""
    sys.stdout.write(json.dumps(facts) + "\n")


def counts() -> dict[str, int]:
    return {name: double.gds_double_count(i) for i, name in enumerate(COUNTS)}


def engine(**options: Any) -> TransferEngine:
    """The nvmeof driver alone, which gets one try."""
    given = {"nvmeof": {"gpudirect": True, **options}}
    return TransferEngine(
        TransferConfig(drivers=("nvmeof",), driver_options=given, rails=RailConfig(attempts=1))
    )


class Gpu:
    """GPU memory that is not at the beginning of its allocation."""

    def __init__(self, nbytes: int, skip: int = 0) -> None:
        self._base = double.gds_double_allocate(nbytes + skip)
        self.source = MemoryRange(self._base + skip, nbytes, owner=self, device=0)
        where = double.gds_double_bytes(self._base)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(
            (ctypes.c_uint8 * (nbytes + skip)).from_address(where), np.uint8
        )[skip:]


def moves(path: Path, **options: Any) -> None:
    """Aligned, unaligned, and past the last whole block: what was meant, and nothing else."""
    size = SIZE + 1234
    path.write_bytes(pattern(2, size).tobytes())
    before = counts()
    with engine(chunk_bytes=64 * KIB, **options) as owner:
        gpu = Gpu(size, skip=0)
        gpu.bytes[:] = pattern(1, size)
        local = owner.register(gpu.source)
        place = owner.import_region(owner.register(FileSource(path)).descriptor())
        held = counts()
        owner.write(local, place, [[0, 0, SIZE]]).wait(DEADLINE_S)
        expected = pattern(2, size)
        expected[:SIZE] = gpu.bytes[:SIZE]
        aligned = path.read_bytes() == expected.tobytes()
        for at, to, length in [(5, 100, 1), (77, 4000, 9000), (0, 70_000, 70_001), (9, SIZE - 10, 700)]:
            owner.write(local, place, [[at, to, length]]).wait(DEADLINE_S)
            expected[to : to + length] = gpu.bytes[at : at + length]
        unaligned = path.read_bytes() == expected.tobytes()
        gpu.bytes[:] = 0
        owner.read(local, place, [[0, 0, size]]).wait(DEADLINE_S)
        read = bool(np.array_equal(gpu.bytes, expected))
        double.gds_double_move_at_most(8192)
        gpu.bytes[:] = 0
        owner.read(local, place, [[0, 0, size]]).wait(DEADLINE_S)
        short = bool(np.array_equal(gpu.bytes, expected))
        double.gds_double_move_at_most(1 << 62)
        done = counts()
    say(
        moves=options, aligned=aligned, unaligned=unaligned, read=read, short=short,
        pinned=held["buffers"] - before["buffers"], batched=done["batched"] - before["batched"],
        left={name: counts()[name] - before[name] for name in COUNTS[:3]},
    )  # fmt: skip


def fails(path: Path) -> None:
    """Errors of cuFile and of the system, and what no file of the kernel is."""
    path.write_bytes(bytes(MIB))
    said = {}
    with engine() as owner:
        local = owner.register(Gpu(MIB).source)
        place = owner.import_region(owner.register(FileSource(path)).descriptor())
        for name, code in (("cufile", 5010), ("eio", -5)):
            double.gds_double_fail_next(code)
            try:
                owner.read(local, place, [[0, 4096, 8192]]).wait(DEADLINE_S)
            except TransferError as error:
                said[name] = str(error)
        os.truncate(path, 64 * KIB)
        try:
            owner.read(local, place, [[0, 128 * KIB, 4096]]).wait(DEADLINE_S)
        except TransferError as error:
            said["short"] = str(error)
    say(fails=said)


def refused() -> None:
    """Memory of a GPU that is not there, and an engine without the option."""
    said = {}
    for name, options, device in (("device", {}, 7), ("option", {"gpudirect": False}, 0)):
        with engine(**options) as owner:
            try:
                owner.register(MemoryRange(Gpu(MIB).source.address, MIB, device=device))
            except TransferError as error:
                said[name] = str(error)
    say(refused=said)


def contexts(path: Path) -> None:
    """The application's context is its thread's after each call of the engine."""
    path.write_bytes(bytes(MIB))
    double.gds_double_enter(OWN_CONTEXT)
    kept = {}
    with engine() as owner:
        region = owner.register(Gpu(MIB).source)
        kept["register"] = double.gds_double_is_in(OWN_CONTEXT)
        place = owner.import_region(owner.register(FileSource(path)).descriptor())
        owner.write(region, place, [[0, 0, MIB]]).wait(DEADLINE_S)
        kept["write"] = double.gds_double_is_in(OWN_CONTEXT)
        region.close()
        kept["close"] = double.gds_double_is_in(OWN_CONTEXT)
        owner.register(Gpu(MIB).source)
    kept["end"] = double.gds_double_is_in(OWN_CONTEXT)
    say(contexts=kept)


def disturbed(path: Path) -> None:
    """Batches that hang until they are cancelled, and such as cuFile loses."""
    path.write_bytes(bytes(SIZE))
    said: dict[str, Any] = {}
    with engine(workers=1, chunk_bytes=64 * KIB) as owner:
        gpu = Gpu(SIZE)
        gpu.bytes[:] = pattern(1, SIZE)
        local = owner.register(gpu.source)
        place = owner.import_region(owner.register(FileSource(path)).descriptor())
        for name, state in (("hanging", (True, False)), ("lost", (False, True))):
            double.gds_double_disturb_batches(*state)
            before, started = counts(), time.monotonic()
            transfer = owner.write(local, place, [[0, 0, SIZE]])
            try:
                transfer.wait(1.0 if name == "hanging" else DEADLINE_S)
            except TransferError as error:
                said[name] = f"{type(error).__name__}: {error}"
            transfer.cancel()
            local.close(DEADLINE_S)  # nothing moves it any more
            done = counts()
            said[f"{name}_s"] = time.monotonic() - started
            said[f"{name}_cancels"] = done["cancels"] - before["cancels"]
            said[f"{name}_again"] = done["singles"] - before["singles"]
            double.gds_double_disturb_batches(False, False)
            local = owner.register(gpu.source)
            owner.write(local, place, [[0, 0, SIZE]]).wait(DEADLINE_S)
        said["after"] = path.read_bytes() == gpu.bytes.tobytes()
    say(disturbed=said)


def scarce(path: Path) -> None:
    """No thread is to be had: with none there, and when one is."""
    process = ctypes.CDLL(None)
    path.write_bytes(bytes(SIZE))
    with engine(workers=2) as owner:
        local = owner.register(Gpu(SIZE).source)
        place = owner.import_region(owner.register(FileSource(path)).descriptor())
        process.refuse_threads(True)
        try:
            owner.write(local, place, [[0, 0, SIZE]]).wait(DEADLINE_S)
        except TransferError as error:
            refused = str(error)
        process.refuse_threads(False)
        owner.write(local, place, [[0, 0, SIZE]]).wait(DEADLINE_S)
    say(scarce=refused)


def main() -> None:
    """All of it, or why the driver cannot be opened."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        path = Path(folder) / "data"
        try:
            moves(path)
        except TransferError as error:
            say(unavailable=str(error))
            return
        moves(path, durable=True)
        moves(path, direct=False)
        fails(path)
        refused()
        if double.gds_double_count(4):  # a cuFile with batches
            disturbed(path)
        contexts(path)
        if "LD_PRELOAD" in os.environ:
            scarce(path)
    say(violations=double.gds_double_violations().decode())


if __name__ == "__main__":
    main()
