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
from inside_doctor import ask_doctor

from mooncake_driver_cxl import Pool, plugin
from mooncake_store import Store, StoreConfig
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError
from mooncake_transfer.testing.owner import RegionOwner
from mooncake_transfer.testing.pattern import digest, pattern

MIB = 1 << 20
NBYTES = MIB
LIMIT_S = 120.0
LENT_BYTES = 8 * MIB  # zeroed first, which takes a minute and a half for 64 MiB of emulated CXL memory
HUGE_PAGES = Path("/dev/hugepages")
HUGE_PAGE = 2 * MIB
# Emulated, a heartbeat may be late and an answer slow.
STORE = StoreConfig(
    lend_from="cxl",
    lease_ttl_s=LIMIT_S,
    client_ttl_s=LIMIT_S,
    reservation_ttl_s=LIMIT_S,
    connect_timeout_s=LIMIT_S,
    call_timeout_s=LIMIT_S,
    transfer_timeout_s=LIMIT_S,
)


def config(path: str, **options: object) -> TransferConfig:
    """An engine that has the pool of a path, and allocates there."""
    found: dict[str, str | int | float | bool] = {"path": path, **options}  # type: ignore[dict-item]
    return TransferConfig(drivers=("cxl",), driver_options={"cxl": found}, allocate_from="cxl")


class StoreClient:
    """What another process does with a store."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def join(self, master: str) -> None:
        """Become a client that lends nothing."""
        self._store = Store(self._engine, master, config=STORE)

    def put(self, key: str, seed: int) -> None:
        """Put a value that both sides can make."""
        self._store.put(key, pattern(seed, NBYTES).tobytes())

    def get(self, key: str) -> str:
        """Digest of a value."""
        return digest(np.frombuffer(self._store.get(key), np.uint8))

    def moved(self) -> dict[str, int]:
        """Bytes by driver."""
        return {rail.driver: rail.bytes for rail in self._engine.rails() if rail.bytes}


class Peer:
    """Another process with an engine. A fork: to import everything anew takes half a minute here."""

    def __init__(self, settings: TransferConfig, kind: Callable[[TransferEngine], object]) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=self._serve, args=(theirs, settings, kind), daemon=True)
        self._process.start()

    @staticmethod
    def _serve(pipe: Connection, settings: TransferConfig, kind: Callable[[TransferEngine], object]) -> None:
        with TransferEngine(settings) as engine:
            there = kind(engine)
            while True:
                name, arguments = pipe.recv()
                pipe.send(getattr(there, name)(*arguments))

    def ask(self, name: str, *arguments: object) -> Any:
        """Have a method called of what is there."""
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
    peer = Peer(settings, RegionOwner)
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
        report["store"] = store(path)
    gc.collect()
    return {**report, "kept": kept(path)}


def store(path: str, **options: object) -> dict[str, object]:
    """A store that lends memory of the pool: its own values and those of another process, and the numbers."""
    settings = config(path, **options)
    peer = Peer(settings, StoreClient)
    with TransferEngine(settings) as engine:
        pool = Pool.open(path, **options)
        free = pool.free_bytes
        with Store(engine, lend_bytes=LENT_BYTES, config=STORE) as owner:
            lent = free - pool.free_bytes
            peer.ask("join", engine.address)
            owner.put("ours", pattern(1, NBYTES).tobytes())
            peer.ask("put", "theirs", 2)
            report: dict[str, object] = {
                "theirs": owner.get("theirs") == pattern(2, NBYTES).tobytes(),
                "ours": peer.ask("get", "ours") == digest(pattern(1, NBYTES)),
                "lent": lent,
                "capacity": owner.stats().capacity_bytes,
                "used": owner.stats().used_bytes,
                "moved": peer.ask("moved"),
            }
            peer.kill()
        report["back"] = pool.free_bytes == free
    return report


def huge_pages() -> dict[str, object]:
    """A pool on hugetlbfs, and what cannot be one."""
    count = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    free = int(count.read_text())
    wanted = {"unaligned": 64 * MIB + 4096, "too many": (free + 1) * HUGE_PAGE}
    report: dict[str, object] = {"free": free}
    for name, size in wanted.items():
        try:
            Pool.open(str(HUGE_PAGES / name), create=True, size_bytes=size)
        except TransferError as error:
            report[name] = f"{type(error).__name__}: {error}"
    path, options = str(HUGE_PAGES / "pool"), {"create": True, "size_bytes": 64 * MIB}
    pool = Pool.open(path, **options)
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    report["maps"] = next(line for line in maps if path in line)
    report["taken"] = free - int(count.read_text())
    del pool
    gc.collect()
    return {**report, "moved": moved_between_processes(path, **options), "kept": kept(path)}


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
            doctor = ask_doctor(MOONCAKE_TRANSFER_DRIVER_OPTIONS__CXL__PATH=path)
            report[name] = {"path": path, "doctor": doctor, **device(path, name == "VMLAB_CXL_DAX")}
    if HUGE_PAGES.is_mount():
        report["huge"] = huge_pages()
    if os.environ.get("VMLAB_CXL_NODE"):
        report["node"] = node(int(os.environ["VMLAB_CXL_NODE"]))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
