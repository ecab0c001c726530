"""Threads of the driver sleep when nothing moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferTimeout
from mooncake_transfer.testing.peer_process import PeerProcess

IDLE_S = 1.0


def test_workers_sleep_between_transfers_and_while_a_peer_does_not_answer(
    start: Callable[..., TransferEngine],
) -> None:
    with PeerProcess(TransferConfig(drivers=("tcp",))) as peer:
        engine = start(connections=2)
        local = engine.allocate(1 << 20)
        remote = engine.import_region(peer.allocate(1 << 20, seed=0).descriptor)
        for nbytes in (64, 1 << 20):
            engine.write(local, remote, [[0, 0, nbytes]]).wait()
        used_s, until_s = time.process_time(), time.monotonic() + IDLE_S
        while time.monotonic() < until_s:
            time.sleep(0.1)
        assert time.process_time() - used_s < IDLE_S / 5, "nothing is under way"
        peer.pause()
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED)
        try:
            used_s = time.process_time()
            with pytest.raises(TransferTimeout):
                engine.write(local, remote, [[0, 0, 64]]).wait(IDLE_S)
            assert time.process_time() - used_s < IDLE_S / 5, "one write waits"
        finally:
            peer.resume()
