"""How long a cluster is without its objects after its leader was killed, and whether any are wrong then."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_store import Store, StoreConfig
from mooncake_store.cluster import Coordination, open_coordination
from mooncake_store.errors import LeaseExpired, MasterUnreachable
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.testing.registry_servers import etcd_server

__all__ = ["Failover", "measure_failover"]

MASTER = Path(__file__).parents[1] / "agents" / "store_cluster_master.py"
VALUE_BYTES = 64
BATCH = 5_000
# The least that etcd gives is one and a half times its own election, in whole seconds.
ETCD_OPTIONS = ("--heartbeat-interval", "50", "--election-timeout", "500")
LEADER_TTL_S = 1.0
DEADLINE_S = 120.0
POLL_S = 0.005
READ, READ_PAUSE_S = 128, 0.005
CLIENT = StoreConfig(heartbeat_s=0.1, reconnect_max_s=0.05, connect_timeout_s=20.0)


@dataclass(frozen=True)
class Failover:
    """What was seen.

    Attributes:
        fill_s: putting all objects took so long.
        elected_s: from the kill to another leader.
        found_s: from then until every object was found.
        missing: objects that were not read afterwards.
        wrong: objects whose bytes were not those that were put, afterwards and all the time.
        reads: values that readers have read and compared, from before the kill until all were found.
        away: calls of theirs that ended with MasterUnreachable or LeaseExpired.
    """

    fill_s: float
    elected_s: float
    found_s: float
    missing: int
    wrong: int
    reads: int
    away: int


def measure_failover(objects: int) -> Failover:
    """Three masters on etcd, one owner, one client; the leader is killed once all objects are stored."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = f"{stack.enter_context(etcd_server(folder, options=ETCD_OPTIONS)).url}/bench"
        masters = dict(stack.enter_context(_Master(url)) for _ in range(3))
        owner_engine, engine = (stack.enter_context(TransferEngine()) for _ in range(2))
        lend = VALUE_BYTES * objects + (1 << 20)
        owner = stack.enter_context(Store(owner_engine, url, lend_bytes=lend, config=CLIENT))
        client = stack.enter_context(Store(engine, url, config=CLIENT))
        coordination = stack.enter_context(closing(open_coordination(url, 10.0)))
        region = engine.allocate(VALUE_BYTES * BATCH)
        began_s = time.monotonic()
        _fill(client, region, objects)
        fill_s = time.monotonic() - began_s
        _wait(lambda: len(owner._notices._ledger) == objects, "the owner's ledger")
        readers = [_Reader(client, engine.allocate(VALUE_BYTES * READ), objects, seed) for seed in range(2)]
        with ExitStack() as reading:
            for reader in readers:
                reading.enter_context(reader)
            _wait(lambda: all(reader.reads for reader in readers), "the first reads")
            elected_s, found_s = _kill_leader(coordination, masters, client, objects)
        missing, wrong = _check(client, region, objects)
    wrong += sum(reader.wrong for reader in readers)
    reads, away = (sum(getattr(reader, name) for reader in readers) for name in ("reads", "away"))
    return Failover(fill_s, elected_s, found_s, missing, wrong, reads, away)


class _Reader:
    """Reads random objects on a thread of its own, and compares every byte, as long as this is entered."""

    def __init__(self, client: Store, region: Region, objects: int, seed: int) -> None:
        self.reads = self.wrong = self.away = 0
        self._client, self._region, self._objects = client, region, objects
        self._random = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(READ_PAUSE_S):
            numbers = self._random.integers(0, self._objects, READ, dtype=np.uint64)
            memory = np.frombuffer(self._region.view(), dtype=np.uint64).reshape(READ, -1)
            memory[:] = np.iinfo(np.uint64).max
            keys = [f"key-{number}" for number in numbers]
            try:
                good = self._client.batch_get_into(
                    keys, self._region, np.arange(READ) * VALUE_BYTES, VALUE_BYTES
                )
            except (MasterUnreachable, LeaseExpired):
                self.away += 1
                continue
            self.reads += sum(good)
            self.wrong += int((np.array(good) & (memory != numbers[:, None]).any(axis=1)).sum())

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


class _Master:
    def __init__(self, url: str) -> None:
        self._command = [sys.executable, str(MASTER), url, str(LEADER_TTL_S), str(VALUE_BYTES)]

    def __enter__(self) -> tuple[str, subprocess.Popen[str]]:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip(), self._process

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def _kill_leader(
    coordination: Coordination, masters: dict[str, subprocess.Popen[str]], client: Store, objects: int
) -> tuple[float, float]:
    leader = coordination.leader()
    assert leader is not None
    masters[leader.address].kill()
    killed_s = time.monotonic()
    _wait(lambda: (now := coordination.leader()) is not None and now.epoch > leader.epoch, "a leader")
    elected_s = time.monotonic()
    _wait(lambda: _objects(client) == objects, "the objects")
    return elected_s - killed_s, time.monotonic() - elected_s


def _objects(client: Store) -> int:
    try:
        return client.stats().objects
    except MasterUnreachable:
        return 0


def _batches(objects: int) -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
    """Keys, offsets in the region, and what each value is: its number, over and over."""
    for start in range(0, objects, BATCH):
        numbers = np.arange(start, min(start + BATCH, objects), dtype=np.uint64)
        values = np.repeat(numbers, VALUE_BYTES // 8).reshape(len(numbers), -1)
        yield [f"key-{number}" for number in numbers], np.arange(len(numbers)) * VALUE_BYTES, values


def _fill(client: Store, region: Region, objects: int) -> None:
    memory = np.frombuffer(region.view(), dtype=np.uint64)
    for keys, offsets, values in _batches(objects):
        memory[: values.size] = values.ravel()
        stored = client.batch_put_from(keys, region, offsets, VALUE_BYTES)
        assert all(stored), f"{stored.count(False)} of {len(keys)} values were not stored"


def _check(client: Store, region: Region, objects: int) -> tuple[int, int]:
    missing = wrong = 0
    memory = np.frombuffer(region.view(), dtype=np.uint64)
    for keys, offsets, values in _batches(objects):
        memory[:] = np.iinfo(np.uint64).max
        good = np.array(client.batch_get_into(keys, region, offsets, VALUE_BYTES))
        same = (memory[: values.size].reshape(values.shape) == values).all(axis=1)
        missing += int((~good).sum())
        wrong += int((good & ~same).sum())
    return missing, wrong


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {DEADLINE_S:g} s")
        time.sleep(POLL_S)
