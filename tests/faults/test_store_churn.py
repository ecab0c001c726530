"""10,000 keys of a cluster put, replaced, read and removed without end, compared with a model of them.

Masters and owners are killed meanwhile. `hatch run faults store -k churn --churn 600` takes ten minutes.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mooncake_store import Store, StoreConfig
from mooncake_store.errors import LeaseExpired, MasterUnreachable, PutFailed, StoreFull
from mooncake_store.testing.processes import StoreProcess
from mooncake_transfer import TransferEngine

KEYS, BATCH, NBYTES = 10_000, 250, 1024
# Every value takes a granule: some of them never fit.
LENT_MIB = 16
LONG_S = 60.0
SETTINGS = StoreConfig(heartbeat_s=0.1, reconnect_max_s=0.2, call_timeout_s=2.0, transfer_timeout_s=2.0)
GONE = -1
# After these a retry is safe; anything else is a mistake of the store.
AWAY = (MasterUnreachable, PutFailed, LeaseExpired, StoreFull)


@dataclass
class Model:
    """What each key may have.

    Attributes:
        now: the version that it has, if nothing was lost; GONE for none; None when nobody knows.
        sure_s: since when that is known.
        lost_s: when something was last killed; older versions may have come back then.
        ordered: how many reads could be compared with the one version that the key had.
    """

    now: list[int | None] = field(default_factory=lambda: [GONE] * KEYS)
    last: list[int] = field(default_factory=lambda: [0] * KEYS)
    sure_s: list[float] = field(default_factory=lambda: [0.0] * KEYS)
    lost_s: float = 0.0
    ordered: int = 0

    def check(self, key: int, value: bytes) -> None:
        """A read has found this."""
        found, version = np.frombuffer(value, dtype="<u4").reshape(-1, 2)[0].tolist()
        assert value == value_of(key, version), f"key {key} has bytes of key {found} or of several versions"
        assert 1 <= version <= self.last[key], f"key {key} has a version that was never put"
        if self.now[key] is not None and self.sure_s[key] > self.lost_s:
            self.ordered += 1
            assert version == self.now[key], f"key {key} has version {version} instead of {self.now[key]}"


def value_of(key: int, version: int) -> bytes:
    return np.array([[key, version]] * (NBYTES // 8), dtype="<u4").tobytes()


class Churn:
    """One client that changes and reads random batches of keys."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.model = store, Model()
        self.region = store.engine.allocate(BATCH * NBYTES)
        self.random = random.Random(seed)
        self.hits = self.calls = self.refused = 0
        self._epoch = 0

    def step(self) -> None:
        keys = self.random.sample(range(KEYS), BATCH)
        (call,) = self.random.choices([self.put, self.get, self.remove], [5, 8, 1])
        self.calls += 1
        try:
            call(keys)
        except AWAY:
            self.refused += 1

    def put(self, keys: list[int]) -> None:
        model, view = self.model, np.frombuffer(self.region.view(), dtype=np.uint8).reshape(BATCH, NBYTES)
        for row, key in enumerate(keys):
            model.now[key] = None
            model.last[key] += 1
            view[row] = np.frombuffer(value_of(key, model.last[key]), dtype=np.uint8)
        stored = self.store.batch_put_from(
            [f"{key}" for key in keys], self.region, np.arange(BATCH) * NBYTES, NBYTES, if_exists="replace"
        )
        for key, good in zip(keys, stored, strict=True):
            if good:
                self.settle(key, model.last[key])

    def remove(self, keys: list[int]) -> None:
        for key in keys:
            self.model.now[key] = None
        self.store.batch_remove([f"{key}" for key in keys])
        for key in keys:
            self.settle(key, GONE)

    def settle(self, key: int, version: int) -> None:
        self.model.now[key], self.model.sure_s[key] = version, time.monotonic()

    def get(self, keys: list[int]) -> None:
        good = self.store.batch_get_into(
            [f"{key}" for key in keys], self.region, np.arange(BATCH) * NBYTES, NBYTES
        )
        self.look_for_another_leader()
        view = self.region.view()
        for row, key in enumerate(keys):
            if good[row]:
                self.hits += 1
                self.model.check(key, bytes(view[row * NBYTES : (row + 1) * NBYTES]))

    def look_for_another_leader(self) -> None:
        """On a busy machine a leader may lose its term; what it knew alone is lost then, too."""
        if self.store._member._epoch != self._epoch:
            self._epoch = self.store._member._epoch
            self.model.lost_s = max(self.model.lost_s, time.monotonic())


class Cluster:
    """Two masters and two owners of one machine, as commands."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._stack = stack
        self._commands = {
            "master": ["master", "--cluster", url, "--leader-ttl-s", "2", "--log-level", "ERROR"],
            "node": ["node", "--master", url, "--lend", f"{LENT_MIB}M"],
        }
        self._running: list[tuple[str, StoreProcess]] = []
        # An owner gives up when it finds no master within its time.
        for kind in ("master", "node"):
            with ThreadPoolExecutor(2) as pool:
                self._running += [(kind, process) for process in pool.map(self._start, [kind] * 2)]

    def _start(self, kind: str) -> StoreProcess:
        return self._stack.enter_context(StoreProcess(*self._commands[kind]))

    def kill_one(self, chance: random.Random) -> None:
        """End one, any, and start another in its place."""
        kind, process = self._running.pop(chance.randrange(len(self._running)))
        process.process.send_signal(signal.SIGKILL)
        process.close()
        self._running.append((kind, self._start(kind)))


@pytest.fixture
def churn(tmp_path: Path) -> Iterator[tuple[Cluster, Churn]]:
    url = f"sqlite:{tmp_path / 'cluster'}"
    with ExitStack() as stack:
        cluster = Cluster(url, stack)
        engine = stack.enter_context(TransferEngine())
        store = stack.enter_context(Store(engine, url, config=SETTINGS))
        yield cluster, Churn(store, seed=1)


def test_ten_thousand_keys_under_churn_are_what_a_model_says(
    churn: tuple[Cluster, Churn], request: pytest.FixtureRequest
) -> None:
    cluster, client = churn
    seconds = float(request.config.getoption("--churn", 3.0))
    end_s, next_kill_s = time.monotonic() + seconds, time.monotonic() + min(5.0, seconds / 2)
    while time.monotonic() < end_s or client.hits < 1000 or client.model.ordered < 1000:
        told = f"{client.hits} hits, {client.model.ordered} of known versions, of {client.calls} calls"
        assert time.monotonic() < end_s + LONG_S, told
        client.step()
        if time.monotonic() >= next_kill_s and next_kill_s < end_s:
            cluster.kill_one(client.random)
            client.model.lost_s, next_kill_s = time.monotonic() + LONG_S, time.monotonic() + 5.0
            # Until somebody leads and owners have come back, older versions may return.
            cluster_is_back(client)
            client.model.lost_s = time.monotonic()
    assert client.refused < client.calls / 2
    assert client.model.ordered > client.hits / 20


def cluster_is_back(client: Churn) -> None:
    """Go on until both owners lend again."""
    end_s = time.monotonic() + LONG_S
    while time.monotonic() < end_s:
        client.step()
        try:
            if client.store.stats().capacity_bytes == 2 * LENT_MIB << 20:
                return
        except MasterUnreachable:
            continue
    raise AssertionError("the owners did not come back")
