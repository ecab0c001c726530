"""What was begun is over for the engine only when no GPU touches its memory any more, whatever failed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cuda_memory import Gpu, Stream, malloc
from gpu_fixtures import config

from mooncake_transfer import RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.testing import PeerProcess, digest, pattern
from mooncake_transfer.testing.fixtures import wait_until

NBYTES = 1 << 20
ALL = [[0, 0, NBYTES]]
APART = [[at * 8192, at * 8192, 4096] for at in range(8)]
DEADLINE_S = 20.0
NOT_YET_S = 0.3


def stays_under_way(engine: TransferEngine, transfer: Transfer) -> None:
    """Look for a while: no operation ends, not even with an error, after which it would be tried again."""
    until = time.monotonic() + NOT_YET_S
    while time.monotonic() < until:
        assert not transfer.done()
        assert _errors(engine) == 0
        time.sleep(0.005)


def _errors(engine: TransferEngine) -> int:
    return sum(counted["errors"] for counted in engine.stats().values())


def granted(engine: TransferEngine, remote: RemoteRegion) -> None:
    """Have a region of this process or a peer ready for use: streams wait for no grant."""
    region = engine.register(malloc(4096).source)
    engine.read(region, remote, [[0, 0, 1]]).wait(DEADLINE_S)


@pytest.mark.parametrize("failing", ["fail record", "fail copy"])
def test_a_batch_that_fails_half_way_ends_when_its_copies_have(
    engine: TransferEngine, device: Gpu, failing: str
) -> None:
    source, place = malloc(NBYTES), malloc(NBYTES)
    source.set(pattern(1, NBYTES))
    remote = engine.import_region(engine.register(place.source).descriptor())
    local = engine.register(source.source)
    granted(engine, remote)
    with device.control("hold", 1), device.control(failing, 1 if failing == "fail record" else 5):
        transfer = engine.write(local, remote, APART)
        stays_under_way(engine, transfer)
    transfer.wait(DEADLINE_S)  # the second time
    assert _errors(engine) > 0
    for at, _, length in APART:
        assert np.array_equal(place.get()[at : at + length], source.get()[at : at + length])


def test_so_does_one_that_a_stream_cannot_wait_for(engine: TransferEngine, device: Gpu) -> None:
    """Two failures: of a copy, and then of the user's stream to wait for those before it."""
    source, place = malloc(NBYTES), malloc(NBYTES)
    remote = engine.import_region(engine.register(place.source).descriptor())
    local = engine.register(source.source)
    granted(engine, remote)
    stream = Stream(device)
    with device.control("hold", 1), device.control("fail copy", 5), device.control("fail wait", 2):
        transfer = engine.write(local, remote, APART, stream=stream.handle.value)
        stays_under_way(engine, transfer)
    transfer.wait(DEADLINE_S)
    assert _errors(engine) > 0
    stream.close()


@pytest.mark.parametrize("reading", [True, False], ids=["read", "write"])
def test_a_gpu_that_is_slow_with_what_is_staged_holds_up_nobody_else(
    engine: TransferEngine, library: Path, device: Gpu, reading: bool
) -> None:
    memory = malloc(NBYTES)
    memory.set(pattern(2, NBYTES))
    on_gpu, on_host = engine.register(memory.source), engine.allocate(NBYTES)
    with PeerProcess(config(library)) as peer:
        staged = peer.allocate(NBYTES, 1, "numpy")
        remote = engine.import_region(staged.descriptor)
        with device.control("hold", 1):
            move = engine.read if reading else engine.write
            transfer = move(on_gpu, remote, ALL)
            stays_under_way(engine, transfer)
            other = engine.import_region(peer.allocate(NBYTES, 3, "numpy").descriptor)
            engine.read(on_host, other, ALL).wait(DEADLINE_S)  # the processor copies
            assert digest(np.frombuffer(on_host.view(), np.uint8)) == digest(pattern(3, NBYTES))
        transfer.wait(DEADLINE_S)
        there = memory.get() if reading else None
        assert (digest(there) if there is not None else peer.digest(staged.number)) == digest(
            pattern(1 if reading else 2, NBYTES)
        )


def test_an_allocation_that_is_being_closed_is_opened_again_afterwards(
    engine: TransferEngine, library: Path, device: Gpu
) -> None:
    """CUDA opens an IPC handle once in a process: who comes while another thread closes it has to wait."""
    place = malloc(NBYTES)
    local = engine.register(place.source)
    with PeerProcess(config(library)) as peer:
        first, second = (peer.allocate(NBYTES, seed, "cuda_memory:part") for seed in (1, 2))
        remote = engine.import_region(first.descriptor)
        engine.read(local, remote, ALL).wait(DEADLINE_S)
        assert device.count("imports") == 1
        with device.control("hold closing", 1):
            with device.control("hold", 1):
                transfer = engine.read(local, remote, ALL)
                closing = threading.Thread(target=peer.close_region, args=(first.number, DEADLINE_S))
                closing.start()
                stays_under_way(engine, transfer)
            # The thread that finds the copy over is the last user of the mapping.
            wait_until(lambda: device.count("closing") == 1, "closing")
            other = engine.import_region(second.descriptor)
            later = engine.read(local, other, ALL)
            stays_under_way(engine, later)
        later.wait(DEADLINE_S)
        transfer.wait(DEADLINE_S)
        closing.join(DEADLINE_S)
        assert digest(place.get()) == digest(pattern(2, NBYTES))
        assert device.count("imports") == 1, "it was staged instead"
