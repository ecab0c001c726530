"""Has peers drop what is left of writes that failed, before others take their place over another rail.

The core says when: a write waits because bytes of an earlier one, over another connection, may land on its
own. See "Late writes" in mooncake_driver.h.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

import msgspec

from mooncake_transfer import _wire
from mooncake_transfer._core import Engine as CoreEngine
from mooncake_transfer._errors import (
    CallTimeout,
    EngineClosed,
    PeerRestarted,
    PeerUnreachable,
    TransferError,
)
from mooncake_transfer._scarce import start_thread
from mooncake_transfer.peer import FENCE_METHOD, Caller

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine

ATTEMPT_S = 1.0
"""What one attempt to connect may take: so long, at most, the engine's close waits for it."""
JOIN_S = 5.0
PAUSE_S = 0.05

Orders = list[tuple[int, int, str, str, bytes]]


class Fencer:
    """Asks peers, each on a thread of its own: one that hangs holds up nobody else."""

    def __init__(self, engine: TransferEngine, core: CoreEngine, timeout_s: float):
        self._engine = weakref.ref(engine)
        self._core = core
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def ask(self, address: str, epoch: int) -> None:
        """Fence what is late at that incarnation of the peer, and tell the core how that went."""
        thread = threading.Thread(
            target=self._run, args=(address, epoch), name=f"mooncake-fence {address}", daemon=True
        )
        try:
            with self._lock:
                start_thread(thread)  # it asks for the lock last
                self._threads.add(thread)
        except TransferError as error:
            self._core.fence_answered(epoch, str(error))

    def stop(self) -> None:
        """End the threads; the channel is closed already."""
        self._stopping.set()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(JOIN_S)

    def _run(self, address: str, epoch: int) -> None:
        failure = "an error of this engine"
        try:
            self.fence(address, epoch, self._timeout_s)
            failure = ""
        except TransferError as error:
            failure = str(error)
        finally:
            self._core.fence_answered(epoch, failure)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def fence(self, address: str, epoch: int, limit_s: float) -> None:
        """Return when nothing of what has failed so far can land any more.

        Raises PeerUnreachable when the peer does not say so in time, PeerRestarted when another process
        answers.
        """
        engine = self._require_engine()
        orders = self._core.fence_orders(epoch)
        if not orders:
            return
        until_s = time.monotonic() + limit_s
        while True:
            try:
                self._order(engine, address, epoch, orders, until_s)
                break
            except CallTimeout as error:
                raise PeerUnreachable(f"the peer did not fence in time: {error}") from None
            except PeerUnreachable:  # the connection may have been lost long ago, and shows it only now
                if time.monotonic() + PAUSE_S >= until_s or self._stopping.wait(PAUSE_S):
                    raise
        self._core.fenced(epoch, orders)

    def _order(
        self, engine: TransferEngine, address: str, epoch: int, orders: Orders, until_s: float
    ) -> None:
        left_s = max(until_s - time.monotonic(), 0.0)
        peer = engine.connect(address, timeout_s=min(left_s, ATTEMPT_S))
        if peer.epoch != epoch:
            raise PeerRestarted(f"another process now answers at {address}")
        left_s = max(until_s - time.monotonic(), 0.0)
        tokens = [(driver, device, token) for _, _, driver, device, token in orders]
        peer.call(FENCE_METHOD, msgspec.msgpack.encode(_wire.FenceOrder(left_s, tokens)), timeout_s=left_s)

    def _require_engine(self) -> TransferEngine:
        engine = self._engine()
        if engine is None or self._stopping.is_set():
            raise EngineClosed("the engine is closing")
        engine._require_open()
        return engine


class Fences:
    """Handler of FENCE_METHOD: ends what the tokens of a peer name."""

    def __init__(self, core: CoreEngine):
        self._core = core

    def __call__(self, body: bytes, caller: Caller) -> bytes:
        """Carry out one order; returns once nothing of what it names can be applied."""
        order = msgspec.msgpack.decode(body, type=_wire.FenceOrder)
        until_s = time.monotonic() + order.timeout_s
        for driver, device, token in order.tokens:
            self._core.fence(driver, device, token, max(until_s - time.monotonic(), 0.0))
        return b""
