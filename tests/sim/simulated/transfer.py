"""Reads and writes of memory of other simulated processes, piece by piece."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_transfer.errors import (
    PeerUnreachable,
    RegionRefused,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from simulated.network import SILENCE_S
from simulated.scheduler import Process, Task

if TYPE_CHECKING:
    from simulated.engine import RemoteRegion, SimEngine, SimRegion

__all__ = ["SimTransfer"]

LOOK_S = 0.02
SMALL, LARGE = 2048, 16384


class SimTransfer:
    """A batch under way. What has ended moves nothing more, but for bytes that a host has sent already."""

    def __init__(
        self, engine: SimEngine, write: bool, local: SimRegion, remote: RemoteRegion, blocks: Any
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._write = write
        self._local = local
        self._remote = remote
        self._failure: TransferError | None = None
        self._over = False
        self._task: Task | None = None
        self._last_s = engine.scheduler.now_s
        self._pieces: deque[tuple[int, int, int]] = deque()
        chance = engine.scheduler.random
        for here, there, nbytes in np.asarray(blocks).tolist():
            done = 0
            while done < nbytes:
                step = min(nbytes - done, chance.randint(SMALL, LARGE))
                self._pieces.append((here + done, there + done, step))
                done += step
        self._soon(self._next)

    # ---- as Transfer

    def cancel(self) -> None:
        self._end(TransferCancelled("the transfer was cancelled"))

    def wait(self, timeout_s: float | None = None) -> None:
        until_s = self._scheduler.true_s(10.0 if timeout_s is None else timeout_s)
        self._task = self._scheduler.here()
        while not self._over and self._scheduler.now_s < until_s:
            self._scheduler.block(until_s)
        self._task = None
        if not self._over:
            self._end(TransferTimeout("the transfer did not end in time"))
        if self._failure is not None:
            raise self._failure

    # ---- the wire

    def _soon(self, call: Any) -> None:
        self._scheduler.after(self._engine.network.latency_s(), call)

    def _end(self, failure: TransferError | None) -> None:
        if self._over:
            return
        self._over, self._failure = True, failure
        if self._task is not None:
            self._scheduler.wake(self._task)

    def _target(self) -> SimEngine:
        return self._remote.peer.connection.server

    def _quiet(self, source: Process, target: Process) -> bool:
        return self._engine.network.blocked(source, target) or target.paused

    def _next(self) -> None:
        """Send the next piece, or ask for it."""
        ours, theirs = self._engine.process, self._target().process
        if self._over or ours.dead:
            return
        if ours.paused:
            ours.waiting.append(self._next)
            return
        if self._engine.network.failing:
            self._engine.network.failing -= 1
            self._end(PeerUnreachable("every rail to the peer has failed"))
        elif not self._pieces:
            self._end(None)
        elif theirs.dead or self._target().closed:
            self._end(PeerUnreachable(f"{self._target().address} went away"))
        elif self._quiet(ours, theirs) or self._quiet(theirs, ours):
            if self._scheduler.now_s - self._last_s > SILENCE_S:
                self._end(PeerUnreachable(f"{self._target().address} is silent"))
            else:
                self._scheduler.after(LOOK_S, self._next)
        else:
            self._last_s = self._scheduler.now_s
            here, there, nbytes = self._pieces.popleft()
            if self._write and self._stops(ours, theirs):
                self._copy_slowly(here, there, nbytes)
            elif self._write:
                data = self._local.array[here : here + nbytes].copy()
                self._soon(partial(self._land, there, data, self._scheduler.now_s))
            else:
                self._fetch(here, there, nbytes)

    def _stops(self, ours: Process, theirs: Process) -> bool:
        """Whether our process is stopped now, in the middle of a copy into memory that it has mapped."""
        stop = self._engine.network.stop_writer
        if stop is None or ours.machine is not theirs.machine or self._region() is None:
            return False
        self._engine.network.stop_writer = None
        stop(ours)
        return True

    def _copy_slowly(self, here: int, there: int, nbytes: int) -> None:
        # No key keeps out who is inside, and nothing tells it what has become of the room meanwhile.
        region, inside = self._region(), self._target().inside
        assert region is not None
        copy = self._remote.described.key, self._engine.process
        inside.append(copy)

        def finish() -> None:
            inside.remove(copy)
            region.array[there : there + nbytes] = self._local.array[here : here + nbytes]
            self._soon(self._next)

        self._engine.process.waiting.append(finish)

    def _region(self) -> SimRegion | None:
        return self._target().keys.get(self._remote.described.key)

    def _land(self, there: int, data: Any, sent_s: float) -> None:
        """Bytes have left their host: they arrive whatever becomes of it."""
        ours, theirs = self._engine.process, self._target().process
        if theirs.dead:
            self._end(PeerUnreachable(f"{self._target().address} went away"))
            return
        if self._quiet(ours, theirs):
            # Of a connection that is silent for longer, the hosts forget what they have.
            if self._scheduler.now_s - sent_s < SILENCE_S:
                self._scheduler.after(LOOK_S, partial(self._land, there, data, sent_s))
            else:
                self._end(PeerUnreachable(f"{self._target().address} is silent"))
            return
        region = self._region()
        if region is None:
            self._end(RegionRefused("the key is not known"))
            return
        region.array[there : there + data.nbytes] = data
        self._soon(self._next)

    def _fetch(self, here: int, there: int, nbytes: int) -> None:
        region = self._region()
        if region is None:
            self._end(RegionRefused("the key is not known"))
            return
        data = region.array[there : there + nbytes].copy()
        self._soon(partial(self._arrive, here, data))

    def _arrive(self, here: int, data: Any) -> None:
        if not self._over and not self._engine.process.dead:
            self._local.array[here : here + data.nbytes] = data
            self._next()
