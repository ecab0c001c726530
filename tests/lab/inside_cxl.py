"""Runs inside the guest: what the driver cxl makes of DAX devices, or of the node that CXL memory became."""

import gc
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_driver_cxl import Pool, plugin
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.testing.owner import RegionOwner
from mooncake_transfer.testing.pattern import digest, pattern

MIB = 1 << 20
NBYTES = MIB
LIMIT_S = 120.0


def config(path: str, **options: object) -> TransferConfig:
    """An engine that has the pool of a path, and allocates there."""
    found: dict[str, str | int | float | bool] = {"path": path, **options}  # type: ignore[dict-item]
    return TransferConfig(drivers=("cxl",), driver_options={"cxl": found}, allocate_from="cxl")


class Peer:
    """Another process that owns regions. A fork: to import everything anew takes half a minute here."""

    def __init__(self, settings: TransferConfig) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=self._serve, args=(theirs, settings), daemon=True)
        self._process.start()

    @staticmethod
    def _serve(pipe: Connection, settings: TransferConfig) -> None:
        with TransferEngine(settings) as engine:
            owner = RegionOwner(engine)
            while True:
                name, arguments = pipe.recv()
                pipe.send(getattr(owner, name)(*arguments))

    def ask(self, name: str, *arguments: object) -> Any:
        """Have a method of RegionOwner called there."""
        self._pipe.send((name, arguments))
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"the other process did not answer {name} within {LIMIT_S:g} s")
        return self._pipe.recv()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join(LIMIT_S)


def moved_between_processes(path: str, **options: object) -> dict[str, object]:
    """Two processes share the pool: bytes there and back, a key that only reads, a region that is gone."""
    settings = config(path, **options)
    peer = Peer(settings)
    with TransferEngine(settings) as engine:
        owned = peer.ask("allocate", NBYTES, 2)
        remote = engine.import_region(owned.descriptor, timeout_s=LIMIT_S)
        local = engine.allocate(NBYTES, driver="")  # in main memory
        memory = np.frombuffer(local.view(), np.uint8)
        engine.read(local, remote, [[0, 0, NBYTES]]).wait(LIMIT_S)
        report: dict[str, object] = {"read": bool(np.array_equal(memory, pattern(2, NBYTES)))}
        memory[:] = pattern(1, NBYTES)
        engine.write(local, remote, [[0, 0, NBYTES]]).wait(LIMIT_S)
        report["written"] = peer.ask("digest", owned.number) == digest(pattern(1, NBYTES))
        reading = engine.import_region(peer.ask("grant", owned.number, "r"))
        report["write with a reading key"] = outcome(
            lambda: engine.write(local, reading, [[0, 0, 64]]).wait(LIMIT_S)
        )
        peer.ask("close_region", owned.number, LIMIT_S)
        report["read of a closed region"] = outcome(
            lambda: engine.read(local, remote, [[0, 0, 64]]).wait(LIMIT_S)
        )
        peer.kill()
    return report


def outcome(call: Callable[[], object]) -> str:
    """What kind of error a call ends in."""
    try:
        call()
    except Exception as error:  # whatever it is, it is the report
        return type(error).__name__
    return "done"


def kept(path: str, **options: object) -> bool:
    """A block that is kept is found again, with its bytes, once the pool was unmapped."""
    pool = Pool.open(path, coherent="false", **options)
    block = pool.allocate(NBYTES, name="kv", keep=True)
    with TransferEngine() as engine, engine.register(block.range) as region:
        np.frombuffer(region.view(), np.uint8)[:] = pattern(7, NBYTES)
    block.flush()
    del block, region, pool
    gc.collect()
    pool = Pool.open(path, coherent="false", **options)
    block = pool.reopen("kv")
    with TransferEngine() as engine, engine.register(block.range) as region:
        return digest(np.frombuffer(region.view(), np.uint8)) == digest(pattern(7, NBYTES))


def device(path: str, shared: bool) -> dict[str, object]:
    """A DAX device as a pool; ``shared``: also with another process."""
    Pool.format(path, overwrite=True)
    size = int(Path(f"/sys/bus/dax/devices/{Path(path).name}/size").read_text())
    report: dict[str, object] = {"nbytes": Pool.open(path).nbytes == size}
    if shared:
        report["moved"] = moved_between_processes(path)
    gc.collect()
    return {**report, "kept": kept(path)}


def node(number: int) -> dict[str, object]:
    """A file of main memory whose pages are bound to the node."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path, size = f"{folder}/pool", {"create": True, "size_bytes": 64 * MIB, "numa_node": number}
        pool = Pool.open(path, **size)
        block = pool.allocate(NBYTES)
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        report: dict[str, object] = {
            "maps": next(line for line in maps if path in line),
            "size": block.nbytes,
        }
        del pool, block
        gc.collect()
        report["moved"] = moved_between_processes(path, **size)
    return report


def main() -> None:
    """Write one JSON document to standard output."""
    report: dict[str, object] = {"devices": getattr(plugin.probe(), "devices", None)}
    for name in ("VMLAB_CXL_DAX", "VMLAB_CXL_PMEM_DAX"):
        for path in os.environ.get(name, "").split():
            report[name] = {"path": path, **device(path, name == "VMLAB_CXL_DAX")}
    if os.environ.get("VMLAB_CXL_NODE"):
        report["node"] = node(int(os.environ["VMLAB_CXL_NODE"]))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
