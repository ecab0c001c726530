"""The part of the driver suite about writes that failed: nothing of them lands after a fence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np
import pytest

from mooncake_transfer import Transfer, TransferEngine
from mooncake_transfer.errors import TransferCancelled, TransferError, TransferTimeout
from mooncake_transfer.testing.fixtures import DEADLINE_S, DriverFixtures, wait_until
from mooncake_transfer.testing.owner import Target
from mooncake_transfer.testing.pattern import digest, pattern
from mooncake_transfer.testing.peer_process import PeerProcess

__all__ = ["Fences"]

NBYTES = 4 << 20
ENDLESS_BLOCKS = 1 << 14
LATE_S = 0.2  # within which bytes that come too late have come
LOCAL_SEED, REMOTE_SEED, OTHER_SEED, LAST_SEED = 1, 2, 3, 9


def _moves(transfer: Transfer) -> Callable[[], bool]:
    return lambda: transfer.bytes_done > 0


class Fences(DriverFixtures):
    """Once ``Peer.fence()`` has returned, nothing of a write that ended before lands: its range is free."""

    def check_fenced(self, engine: TransferEngine, target: Target, address: str, number: int) -> None:
        """Fence, let somebody else have the range, and look whether it stays so; then all still works."""
        engine.connect(address).fence(timeout_s=DEADLINE_S)
        target.fill(number, OTHER_SEED)
        expected = digest(pattern(OTHER_SEED, NBYTES))
        until = time.monotonic() + LATE_S
        while time.monotonic() < until:
            assert target.digest(number) == expected

    def test_nothing_of_a_cancelled_write_lands_after_a_fence(
        self, engine: TransferEngine, target: Target
    ) -> None:
        """Cancelled while it moved bytes."""
        owned = target.allocate(NBYTES, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        local, memory = self.local(engine, NBYTES, LOCAL_SEED)
        blocks = np.tile(np.array([[0, 0, NBYTES]], np.uint64), (ENDLESS_BLOCKS, 1))
        for _ in range(3):
            transfer = engine.write(local, remote, blocks)
            wait_until(_moves(transfer), "the transfer moves bytes")
            transfer.cancel()
            with pytest.raises(TransferCancelled):
                transfer.wait(DEADLINE_S)
            self.check_fenced(engine, target, remote.peer.address, owned.number)
        memory[:] = pattern(LAST_SEED, NBYTES)
        engine.write(local, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert target.digest(owned.number) == digest(pattern(LAST_SEED, NBYTES))

    def test_nothing_of_a_write_to_a_stopped_peer_lands_after_a_fence(
        self, engine: TransferEngine, peer: PeerProcess
    ) -> None:
        """Its bytes wait in front of a process that does not run; then it does."""
        owned = peer.allocate(NBYTES, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        local, _ = self.local(engine, NBYTES, LOCAL_SEED)
        engine.write(local, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        peer.pause()
        try:
            # A driver that needs no help of the peer is through, which is as good.
            with contextlib.suppress(TransferTimeout):
                engine.write(local, remote, [[0, 0, NBYTES]]).wait(0.2)
        finally:
            peer.resume()
        self.check_fenced(engine, peer, remote.peer.address, owned.number)

    def test_a_token_of_nobody_is_refused(self, engine: TransferEngine) -> None:
        """Tokens come from the network; a driver without a fence has no tokens."""
        ((driver, device, _),) = engine._core.addresses()
        for token in (b"", b"?", bytes(1024)):
            with pytest.raises(TransferError):
                engine._core.fence(driver, device, token, 1.0)
