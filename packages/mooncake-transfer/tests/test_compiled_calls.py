"""What compiled code of other packages asks peers and moves bytes by; called by ctypes here."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_transfer import Peer, Region, RemoteRegion, TransferEngine
from mooncake_transfer.errors import (
    CallTimeout,
    EngineClosed,
    NoRoute,
    PeerUnreachable,
    RegionClosed,
    RegionRefused,
    TransferCancelled,
    TransferTimeout,
)
from mooncake_transfer.testing.compiled_calls import WRITE, table_of
from mooncake_transfer.testing.fake import FakeFabric

DONE, FAILED, REFUSED = 0, 1, 2


class Calls:
    """The functions, with results as Python has them."""

    def __init__(self, engine: TransferEngine) -> None:
        self.capsule = engine.compiled_calls()
        self.table = table_of(self.capsule)

    def call(self, peer: Peer, method: str, body: bytes, timeout_s: float = 30.0) -> bytes | None:
        """None for a refusal."""
        parts: list[bytes] = []
        write = WRITE(lambda reply, data, nbytes: parts.append(ctypes.string_at(data, nbytes)))
        failure = ctypes.c_void_p()
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        outcome = self.table.call(
            self.table.context,
            peer.connection,
            method.encode(),
            ctypes.cast(ctypes.c_char_p(body), ctypes.c_void_p),
            len(body),
            deadline_ns,
            None,
            write,
            ctypes.byref(failure),
        )
        self._raise(failure)
        assert outcome == (DONE if parts else REFUSED)
        return parts[0] if parts else None

    def begin(self, write: bool, region: Region, remote: RemoteRegion, block: tuple[int, int, int]) -> int:
        local = self.table.keep_region(self.table.context, region)
        there = self.table.keep_remote(self.table.context, remote)
        assert local
        assert there
        failure = ctypes.c_void_p()
        run = self.table.begin(self.table.context, write, local, there, *block, ctypes.byref(failure))
        self.table.drop_region(local)
        self.table.drop_remote(there)
        self._raise(failure)
        assert run
        return int(run)

    def finish(self, run: int, timeout_s: float = 30.0) -> None:
        failure = ctypes.c_void_p()
        outcome = self.table.finish(run, time.monotonic_ns() + int(timeout_s * 1e9), ctypes.byref(failure))
        self.table.end(run)
        self._raise(failure)
        assert outcome == DONE

    def _raise(self, failure: ctypes.c_void_p) -> None:
        if failure.value is not None:
            self.table.raise_failure(failure)


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with FakeFabric() as fabric:
        yield fabric


@pytest.fixture
def engines(fabric: FakeFabric) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with TransferEngine(fabric.config("there")) as there, TransferEngine(fabric.config("here")) as here:
        yield there, here


Both = tuple[TransferEngine, TransferEngine]


def test_a_peer_answers_or_refuses(engines: Both) -> None:
    there, here = engines
    there.serve("turn", lambda payload, caller: payload[::-1])
    calls, peer = Calls(here), here.connect(there.address)
    assert calls.call(peer, "turn", b"abc") == b"cba"
    assert calls.call(peer, "turn", b"x" * 200_000) == b"x" * 200_000
    assert calls.call(peer, "unknown", b"abc") is None


def test_what_no_peer_answers_fails_as_a_call_of_python_does(engines: Both) -> None:
    there, here = engines
    over = threading.Event()
    there.serve("hang", lambda payload, caller: b"%d" % over.wait(60.0))
    calls, peer = Calls(here), here.connect(there.address)
    with pytest.raises(CallTimeout):
        calls.call(peer, "hang", b"", timeout_s=0.05)
    over.set()
    there.close()
    with pytest.raises(PeerUnreachable):
        calls.call(peer, "hang", b"")


def test_a_block_is_written_and_read(engines: Both) -> None:
    there, here = engines
    calls, target, local = Calls(here), there.allocate(1 << 16), here.allocate(1 << 16)
    remote = here.import_region(target.descriptor())
    local.view()[:100] = bytes(range(100))
    calls.finish(calls.begin(True, local, remote, (10, 1000, 50)))
    assert bytes(target.view()[1000:1050]) == bytes(range(10, 60))
    calls.finish(calls.begin(False, local, remote, (5000, 1000, 50)))
    assert bytes(local.view()[5000:5050]) == bytes(range(10, 60))


def test_what_cannot_begin_fails_with_the_exception_of_a_transfer(engines: Both) -> None:
    there, here = engines
    calls, target, local = Calls(here), there.allocate(1 << 16), here.allocate(1 << 16)
    remote = here.import_region(target.descriptor())
    with pytest.raises(RegionRefused):
        calls.begin(False, local, remote, (0, 1 << 16, 1))
    kept = calls.table.keep_region(calls.table.context, local)
    there_too = calls.table.keep_remote(calls.table.context, remote)
    local.close()
    failure = ctypes.c_void_p()
    block = (0, 0, 16)
    assert not calls.table.begin(calls.table.context, 0, kept, there_too, *block, ctypes.byref(failure))
    with pytest.raises(NoRoute, match="does not know the local region"):
        calls.table.raise_failure(failure)
    calls.table.drop_region(kept)
    calls.table.drop_remote(there_too)


def test_only_open_regions_of_this_engine_are_kept(engines: Both) -> None:
    there, here = engines
    calls, theirs, ours = Calls(here), there.allocate(4096), here.allocate(4096)
    remote = there.import_region(ours.descriptor())
    ours.close()
    for thing in (theirs, ours, remote, object(), None):
        assert not calls.table.keep_region(calls.table.context, thing)
        assert not calls.table.keep_remote(calls.table.context, thing)


def test_a_run_ends_at_its_deadline_and_when_it_is_cancelled(fabric: FakeFabric, engines: Both) -> None:
    there, here = engines
    calls, target, local = Calls(here), there.allocate(4096), here.allocate(4096)
    remote = here.import_region(target.descriptor())
    fabric.device("here").lose(rate=1.0)
    with pytest.raises(TransferTimeout, match=r"did not finish within 0\.0"):
        calls.finish(calls.begin(False, local, remote, (0, 0, 4096)), timeout_s=0.05)
    run = calls.begin(False, local, remote, (0, 0, 4096))
    calls.table.cancel(run)
    with pytest.raises(TransferCancelled):
        calls.finish(run)
    local.close(5.0)  # nothing uses it any more


def test_after_the_engine_was_closed_everything_fails(engines: Both) -> None:
    there, here = engines
    calls, peer = Calls(here), here.connect(there.address)
    target, local = there.allocate(4096), here.allocate(4096)
    kept = calls.table.keep_region(calls.table.context, local)
    remote = calls.table.keep_remote(calls.table.context, here.import_region(target.descriptor()))
    here.close()
    failure = ctypes.c_void_p()
    block = (0, 0, 4096)
    assert not calls.table.begin(calls.table.context, 1, kept, remote, *block, ctypes.byref(failure))
    with pytest.raises((EngineClosed, RegionClosed)):
        calls.table.raise_failure(failure)
    with pytest.raises(PeerUnreachable):
        calls.call(peer, "turn", b"")
    calls.table.drop_region(kept)
    calls.table.drop_remote(remote)
    with pytest.raises(EngineClosed):
        here.compiled_calls()


def test_bytes_come_whole_whatever_their_number(engines: Both) -> None:
    there, here = engines
    calls, target, local = Calls(here), there.allocate(1 << 20), here.allocate(1 << 20)
    remote = here.import_region(target.descriptor())
    random = np.random.default_rng(7)
    source = np.frombuffer(target.view(), dtype=np.uint8)
    place = np.frombuffer(local.view(), dtype=np.uint8)
    source[:] = random.integers(0, 256, len(source), dtype=np.uint8)
    for nbytes in (1, 63, 4096, 65_537, 1 << 20):
        place[:] = 0
        calls.finish(calls.begin(False, local, remote, (0, (1 << 20) - nbytes, nbytes)))
        assert np.array_equal(place[:nbytes], source[-nbytes:])
        assert not place[nbytes:].any()
