"""What clients of a simulated store do now and then: keep, copy and drain values, and end many at once."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from mooncake_store import errors
from simulated.history import content
from simulated.load import KEYS, Load

__all__ = ["RareLoad"]

COPY_S, DRAIN_S = 1.0, 1.5
NBYTES, LAYER_BYTES = 6000, 2000
SESSIONS = ["s", "t"]


class RareLoad(Load):
    """Besides, what comes seldom."""

    def _rare(self) -> list[tuple[str, float]]:
        owns = self._store.segment_id != 0
        return [
            ("pin", 0.5),
            ("unpin", 0.5),
            ("end_session", 0.4),
            ("replicate", 0.6),
            ("copy", 0.6),
            # What moves is there twice for a while, and no quota keeps it from that.
            ("move", 0.0 if self._store.config.tenant else 0.6),
            ("put_layers", 1.0),
            ("get_layers", 1.5),
            ("remove_all", 0.1),
            ("drain", 0.1 if owns else 0.0),
        ]

    def run(self) -> None:
        """See Load."""
        self._known: set[int] = set()
        self.calls = [*self.calls, *((getattr(self, name), weight) for name, weight in self._rare())]
        super().run()

    # ---- how values are kept

    def pin(self) -> None:
        """For a while, or for good: such a value never leaves by itself."""
        with suppress(errors.KeyNotFound):
            self._store.pin(self._key(), soft_s=self._scheduler.random.choice([0.5, 3.0, None]))

    def unpin(self) -> None:
        """All of them, so that there is room again."""
        self._store.batch_unpin([f"key-{i}" for i in range(KEYS)])

    def end_session(self) -> None:
        """Its values leave first from now on."""
        self._store.end_session(self._scheduler.random.choice(SESSIONS))

    # ---- where they lie

    def replicate(self) -> None:
        """Some more or fewer replicas."""
        keys = self._scheduler.random.sample([f"key-{i}" for i in range(KEYS)], 2)
        self._store.replicate(keys, self._scheduler.random.randint(1, 2), timeout_s=COPY_S)

    def copy(self) -> None:
        """Into the segment of any owner."""
        target = self._segments(1)
        with suppress(errors.KeyNotFound, errors.CopyFailed):
            self._store.copy(self._key(), *target, timeout_s=COPY_S)

    def move(self) -> None:
        """From where it is, if it is where it is taken from."""
        both = self._segments(2)
        with suppress(errors.KeyNotFound, errors.CopyFailed):
            self._store.move(self._key(), *both, timeout_s=COPY_S)

    def drain(self) -> None:
        """The own segment, and have it take values again afterwards."""
        self._cluster.drained_s = float("inf")  # who is cut off from the master drains on
        try:
            self._store.drain(timeout_s=DRAIN_S)
        finally:
            self._store.stop_draining()
        self._cluster.drained_s = self._scheduler.now_s

    def _segments(self, count: int) -> list[int]:
        """Of owners that are there, or were: who asks cannot know."""
        for actor in self._cluster.actors:
            if actor.store is not None and actor.store.segment_id:
                self._known.add(actor.store.segment_id)
        return self._scheduler.random.sample(sorted(self._known | {1, 2}), count)

    # ---- layer by layer

    def put_layers(self) -> None:
        """Values written one layer after the other, under one reservation."""
        chance = self._scheduler.random
        keys = chance.sample([f"key-{i}" for i in range(KEYS)], 2)
        puts = [self._history.begin(key, NBYTES, self._scheduler.now_s) for key in keys]
        for at, put in enumerate(puts):
            value = content(put.number, put.key, NBYTES)
            self._region.array[at * NBYTES : (at + 1) * NBYTES] = np.frombuffer(value, dtype=np.uint8)
        with self._store.write_session(keys, NBYTES, if_exists="replace") as session:
            for start in range(0, NBYTES, LAYER_BYTES):
                parts = [(at, start, at * NBYTES + start, LAYER_BYTES) for at in session.placed.nonzero()[0]]
                session.write_parts(self._region, parts)
                self._scheduler.block(self._scheduler.now_s + chance.uniform(0, 0.3))
        for put, stored in zip(puts, session.stored.tolist(), strict=True):
            if stored:
                self._history.end(put, self._scheduler.now_s)

    def get_layers(self) -> None:
        """A value of any size, read piece after piece under one lease."""
        chance, key, began_s = self._scheduler.random, self._key(), self._scheduler.now_s
        with self._store.read_session([key]) as session:
            nbytes, found = int(session.sizes[0]), bool(session.found[0])
            for start in range(0, nbytes, LAYER_BYTES):
                part = (0, start, start, min(LAYER_BYTES, nbytes - start))
                session.read_parts(self._region, [part])
                self._scheduler.block(self._scheduler.now_s + chance.uniform(0, 0.3))
        if found and session.good[0]:
            self._history.read(key, self._region.array[:nbytes].tobytes(), began_s)
        else:
            self._history.missed()

    # ---- everything

    def remove_all(self) -> None:
        """All that the tenant has."""
        removals = [self._history.begin(f"key-{i}", None, self._scheduler.now_s) for i in range(KEYS)]
        self._store.remove_all()
        for removal in removals:
            self._history.end(removal, self._scheduler.now_s)
