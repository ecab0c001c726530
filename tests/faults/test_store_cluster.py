"""Three masters on etcd, two nodes, and load: whoever is killed, no reader sees wrong bytes."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mooncake_store import Store, StoreConfig, protocol
from mooncake_store.cluster import Coordination, Leader, open_coordination
from mooncake_store.errors import KeyNotFound, LeaseExpired, MasterUnreachable, PutFailed, StoreFull
from mooncake_store.policy import PutPolicy
from mooncake_store.testing.processes import StoreProcess
from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.registry_servers import etcd_server
from mooncake_transfer.testing.stopping import stop_process

KIB = 1 << 10
DEADLINE_S = 60.0
CONFIG = StoreConfig(heartbeat_s=0.1, reconnect_max_s=0.2, call_timeout_s=2.0, connect_timeout_s=10.0)


def value_of(key: str) -> bytes:
    """What is put under a key, and nothing else ever."""
    number = int(key.partition("-")[2])
    return np.random.default_rng(number).integers(0, 256, 4 * KIB + number % 7, dtype=np.uint8).tobytes()


@dataclass
class Load:
    """Writers and readers of values that tell what they are, until they are told to stop."""

    store: Store
    finished: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unexpected: list[BaseException] = field(default_factory=list)
    reads: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, stack: ExitStack) -> None:
        for work in (self._write, self._read, self._read):
            thread = threading.Thread(target=self._watched, args=(work,))
            stack.callback(thread.join, DEADLINE_S)
            thread.start()
        stack.callback(self.stop.set)

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.unexpected.append(error)

    def _write(self) -> None:
        number = 0
        while not self.stop.is_set():
            key = f"key-{number}"
            try:
                self.store.put(key, value_of(key), if_exists="keep")
            except (MasterUnreachable, PutFailed, StoreFull):
                self.stop.wait(0.01)
                continue
            self.finished.append(key)
            number += 1

    def _read(self) -> None:
        choice = random.Random(len(self.finished))
        while not self.stop.is_set():
            if not self.finished:
                self.stop.wait(0.01)
                continue
            key = choice.choice(self.finished)
            try:
                value = self.store.get(key)
            except (KeyNotFound, LeaseExpired, MasterUnreachable):
                continue
            self.reads += 1
            if value != value_of(key):
                self.wrong.append(key)

    def progress(self) -> Callable[[], bool]:
        """Whether there have been writes and reads since now."""
        writes, reads = len(self.finished), self.reads
        return lambda: len(self.finished) > writes + 50 and self.reads > reads + 50


@dataclass
class Cluster:
    coordination: Coordination
    masters: dict[str, StoreProcess]
    nodes: list[StoreProcess]
    url: str

    def leader(self) -> Leader | None:
        return self.coordination.leader()


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.02)


def settle(store: Store) -> None:
    """Wait until all owners know of all that is stored: they take what the master tells them in order."""
    mark = protocol.Reserve(
        digests=b"m" * 16,
        keys=[b"mark"],
        sizes=(1).to_bytes(8, "little"),
        if_exists="replace",
        avoid=[],
        policy=PutPolicy(replicas=2),
    )
    reserved = store._member.ask(mark, protocol.Reserved)
    commit = protocol.Commit(reservation=reserved.reservation, failed=[], if_exists="replace", notices_seen=0)
    assert store._member.conclude(commit, mark.epoch, protocol.Committed) is not None
    store._member.ask(protocol.Remove(digests=mark.digests), protocol.Found)
    wait_until(lambda: store.stats().retiring_bytes == 0, "the owners' word that the mark is gone")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        url = f"{stack.enter_context(etcd_server(tmp_path)).url}/kv"
        start = ["master", "--cluster", url, "--leader-ttl-s", "5", "--log-level", "WARNING"]
        masters = [stack.enter_context(StoreProcess(*start)) for _ in range(3)]
        lend = ["node", "--master", url, "--lend", "64M"]
        nodes = [stack.enter_context(StoreProcess(*lend)) for _ in range(2)]
        coordination = stack.enter_context(closing(open_coordination(url, 10.0)))
        yield Cluster(coordination, {master.address: master for master in masters}, nodes, url)


@pytest.fixture
def load(cluster: Cluster) -> Iterator[Load]:
    with ExitStack() as stack:
        engine = stack.enter_context(TransferEngine())
        running = Load(stack.enter_context(Store(engine, cluster.url, config=CONFIG)))
        running.run(stack)
        wait_until(running.progress(), "load at the start")
        yield running
    assert running.unexpected == []


def test_no_reader_sees_wrong_bytes_whoever_is_killed_or_stopped(cluster: Cluster, load: Load) -> None:
    first = cluster.leader()
    assert first is not None
    # A follower: nobody notices.
    follower = next(address for address in cluster.masters if address != first.address)
    cluster.masters.pop(follower).process.kill()
    wait_until(load.progress(), "load without a follower")
    assert cluster.leader() == first
    # The leader, stopped: another one leads, and the old one finds that out when it goes on.
    stopped = cluster.masters[first.address].process
    stop_process(stopped.pid)
    wait_until(lambda: (now := cluster.leader()) is not None and now.epoch > first.epoch, "a second leader")
    wait_until(load.progress(), "load with the second leader")
    stopped.send_signal(signal.SIGCONT)
    wait_until(load.progress(), "load with two who think they lead")
    second = cluster.leader()
    assert second is not None
    # The leader, killed.
    known = load.finished[-100:]
    settle(load.store)
    cluster.masters.pop(second.address).process.kill()
    wait_until(lambda: (now := cluster.leader()) is not None and now.epoch > second.epoch, "a third leader")
    wait_until(load.progress(), "load with the third leader")
    # What the owners knew of is there again.
    wait_until(lambda: all(load.store.batch_exist(known)), "what was stored before the kill")
    # An owner.
    cluster.nodes[0].process.kill()
    wait_until(load.progress(), "load without an owner")
    assert load.wrong == []
