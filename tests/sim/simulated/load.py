"""What the clients of a simulated store do all the time, and what they check of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store import Store, errors
from mooncake_store.policy import PutPolicy
from mooncake_transfer.errors import TransferError
from simulated.history import History, content
from simulated.scheduler import Scheduler

if TYPE_CHECKING:
    from simulated.cluster import Cluster

__all__ = ["Load"]

SIZES = [0, 1, 100, 4096, 4097, 8192, 9000, 20000]
KEYS = 8
PAUSE_S = 0.1
SLOW_READS = 0.2  # of those in parts
# What a call may raise when something is away, full or forbidden. Of these a put may have come about:
UNKNOWN = (errors.MasterUnreachable, errors.PutFailed, errors.MasterRefused)
NOT_STORED = (errors.StoreFull, errors.KeyExists, errors.QuotaExceeded)
AWAY = (*UNKNOWN, errors.StoreClosed, errors.RateLimited)
POLICIES = [
    None,
    None,
    None,
    PutPolicy(replicas=2),
    PutPolicy(same_node=True),
    PutPolicy(priority=3, group="g"),
    PutPolicy(session="s"),
    PutPolicy(soft_pin_s=1.0),
]


class Load:
    """One thread of one process that puts, reads and removes values of its tenant."""

    def __init__(self, cluster: Cluster, store: Store, history: History) -> None:
        self._cluster = cluster
        self._scheduler: Scheduler = cluster.scheduler
        self._store = store
        self._history = history
        self._region: Any = store.engine.allocate(64 << 10, name="load")
        self.calls: list[tuple[Callable[[], None], int]] = [
            (self.put, 8),
            (self.get, 12),
            (self.put_batch, 3),
            (self.get_batch, 4),
            (self.get_range, 3),
            (self.exist, 1),
            (self.remove, 1),
        ]

    def run(self) -> None:
        """Until the cluster says that it is enough."""
        chance = self._scheduler.random
        calls = [call for call, _ in self.calls]
        weights = [weight for _, weight in self.calls]
        while not self._cluster.load_over:
            (call,) = chance.choices(calls, weights)
            with self._cluster.watched(call.__name__):
                try:
                    call()
                except AWAY as error:
                    self._scheduler.note(type(error).__name__)
                except TransferError as error:
                    self._scheduler.note(type(error).__name__)
            self._scheduler.block(self._scheduler.now_s + chance.uniform(0, PAUSE_S))

    # ---- puts

    def put(self) -> None:
        """One value."""
        chance = self._scheduler.random
        key, nbytes = self._key(), chance.choice(SIZES)
        if_exists = chance.choice(["replace", "replace", "error"])
        put = self._history.begin(key, nbytes, self._scheduler.now_s)
        value = content(put.number, key, nbytes)
        try:
            self._store.put(key, value, if_exists=if_exists, policy=chance.choice(POLICIES))
        except NOT_STORED:
            self._history.forget(put)
        else:
            self._history.end(put, self._scheduler.now_s)
            self._scheduler.note("stored", put.number)

    def put_batch(self) -> None:
        """Several values of a region."""
        chance = self._scheduler.random
        keys = chance.sample([f"key-{i}" for i in range(KEYS)], 3)
        sizes = [chance.choice(SIZES) for _ in keys]
        puts = [
            self._history.begin(key, nbytes, self._scheduler.now_s)
            for key, nbytes in zip(keys, sizes, strict=True)
        ]
        offsets = np.arange(3) * 20480
        for put, offset in zip(puts, offsets.tolist(), strict=True):
            value = content(put.number, put.key, put.nbytes or 0)
            self._region.array[offset : offset + len(value)] = np.frombuffer(value, dtype=np.uint8)
        stored = self._store.batch_put_from(keys, self._region, offsets, sizes, if_exists="replace")
        for put, good in zip(puts, stored, strict=True):
            if good:
                self._history.end(put, self._scheduler.now_s)
        self._scheduler.note("stored", stored)

    def remove(self) -> None:
        """One value."""
        removal = self._history.begin(self._key(), None, self._scheduler.now_s)
        with suppress(errors.KeyNotFound):
            self._store.remove(removal.key)
        # Asked twice, the second time there may have been nothing left.
        self._history.end(removal, self._scheduler.now_s)

    # ---- gets

    def get(self) -> None:
        """One value."""
        key, began_s = self._key(), self._scheduler.now_s
        try:
            value = self._store.get(key)
        except (errors.KeyNotFound, errors.LeaseExpired):
            self._history.missed()
            return
        self._history.read(key, value, began_s)
        self._scheduler.note("read", key, len(value))

    def get_batch(self) -> None:
        """Several values into a region, whose sizes are asked for first."""
        chance, began_s = self._scheduler.random, self._scheduler.now_s
        keys = chance.sample([f"key-{i}" for i in range(KEYS)], 3)
        sizes = [size or 0 for size in self._store.batch_size(keys)]
        offsets = np.arange(3) * 20480
        try:
            good = self._store.batch_get_into(keys, self._region, offsets, sizes)
        except (errors.SizeMismatch, errors.LeaseExpired):
            return  # replaced meanwhile, or slower than a lease, twice
        for key, offset, nbytes, right in zip(keys, offsets.tolist(), sizes, good, strict=True):
            if right:
                value = self._region.array[offset : offset + nbytes].tobytes()
                self._history.read(key, value, began_s)
            else:
                self._history.missed()
        self._scheduler.note("read", good)

    def get_range(self) -> None:
        """A part of a value: all of it, in two halves, under one lease."""
        key, began_s = self._key(), self._scheduler.now_s
        try:
            reader = self._store.open_value(key)
        except (errors.KeyNotFound, errors.LeaseExpired):
            self._history.missed()
            return
        half = reader.nbytes // 2
        try:
            value = reader.read(0, half)
            # Now and then for longer than a lease lasts that nobody renews.
            chance = self._scheduler.random
            pause_s = chance.uniform(0, 4.0 if chance.random() < SLOW_READS else 0.2)
            self._scheduler.block(self._scheduler.now_s + pause_s)
            value += reader.read(half, reader.nbytes - half)
            reader.close()
        except (errors.KeyNotFound, errors.LeaseExpired):
            self._history.missed()
            return
        finally:
            reader.give_up()
        self._history.read(key, value, began_s)

    def exist(self) -> None:
        """Whether some are there; says nothing of their bytes."""
        self._store.batch_exist([f"key-{i}" for i in range(KEYS)])

    def _key(self) -> str:
        return f"key-{self._scheduler.random.randrange(KEYS)}"
