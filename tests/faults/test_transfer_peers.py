"""Processes that die, stop, come back, fork and end: nobody hangs, and no wrong memory is touched."""

from __future__ import annotations

import base64
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_transfer import RemoteRegion, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import (
    PeerRestarted,
    PeerUnreachable,
    RegionRefused,
    TransferError,
    TransferTimeout,
)
from mooncake_transfer.testing import PeerProcess, digest, pattern
from mooncake_transfer.testing.fixtures import bytes_of, wait_until
from mooncake_transfer.testing.owner import OwnedRegion
from mooncake_transfer.testing.ports import free_port

NBYTES = 4 << 20
# 64 GiB between two regions of 4 MiB: nothing is through before the test has acted.
ENDLESS = np.tile(np.array([[0, 0, NBYTES]], np.uint64), (1 << 14, 1))
ALL = [[0, 0, NBYTES]]
DEADLINE_S = 20.0
LOSS_S = 60.0  # how late the end of a peer may show
EXIT_S = 60.0  # of a process that opens an engine, begins transfers, and ends
AT_ONCE_S = 10.0  # of that, for the end alone
# The causes that messages are to have, in the words of whoever notices first.
GONE = r"[Cc]onnection (was )?(reset|refused)|Broken pipe|closed the connection|process \S* ?has ended"
REVOKED = r"no such region \(closed|region is (being )?closed|key .*was revoked|deregistered|not registered"
WAITS = r"bytes were moved, the rest waits for "

both_ways = pytest.mark.parametrize("way", ["read", "write"])


@pytest.fixture(params=["tcp", "shm"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(driver: str) -> TransferConfig:
    return TransferConfig(drivers=(driver,))


@pytest.fixture
def engine(config: TransferConfig) -> Iterator[TransferEngine]:
    with TransferEngine(config) as engine:
        yield engine


@pytest.fixture
def peer(config: TransferConfig) -> Iterator[PeerProcess]:
    with PeerProcess(config) as peer:
        yield peer


def begin(engine: TransferEngine, way: str, remote: RemoteRegion, blocks: Any) -> Transfer:
    move = engine.read if way == "read" else engine.write
    return move(engine.allocate(NBYTES), remote, blocks)


def begin_endless(engine: TransferEngine, way: str, owned: OwnedRegion) -> Transfer:
    transfer = begin(engine, way, engine.import_region(owned.descriptor), ENDLESS)
    wait_until(lambda: transfer.bytes_done > 0, "it moves bytes")
    return transfer


def check_names(error: BaseException, peer: PeerProcess, driver: str, cause: str) -> None:
    """Which peer, by which driver, and why: the cause as a pattern."""
    text = str(error)
    assert re.search(cause, text)
    assert peer.address in text
    assert driver in text
    assert "owned-1" in text


@both_ways
def test_who_waits_for_a_killed_peer_learns_of_it(
    engine: TransferEngine, peer: PeerProcess, driver: str, way: str
) -> None:
    transfer = begin_endless(engine, way, peer.allocate(NBYTES, 1))
    peer.kill()
    began = time.monotonic()
    with pytest.raises(PeerUnreachable) as caught:
        transfer.wait(LOSS_S)
    assert time.monotonic() - began < LOSS_S
    check_names(caught.value, peer, driver, GONE)


@both_ways
def test_who_waits_for_a_stopped_peer_waits_until_his_deadline(
    engine: TransferEngine, peer: PeerProcess, driver: str, way: str
) -> None:
    """SIGSTOP, and SIGCONT later: the transfer is over in between, the peer is as good as before."""
    owned = peer.allocate(NBYTES, 1)
    if driver == "shm":
        # Bytes of a stopped process can be had without it; only what needs its answer waits.
        remote = engine.import_region(owned.descriptor)
        begin(engine, way, remote, ALL).wait(DEADLINE_S)
    transfer = begin_endless(engine, way, owned)
    peer.pause()
    try:
        began = time.monotonic()
        with pytest.raises(TransferTimeout) as caught:
            transfer.wait(0.3)
        assert time.monotonic() - began < 5.0
        check_names(caught.value, peer, driver, WAITS)
        assert transfer.done()
    finally:
        peer.resume()
    place = engine.allocate(NBYTES)
    other = peer.allocate(NBYTES, 7)
    engine.read(place, engine.import_region(other.descriptor), ALL).wait(DEADLINE_S)
    assert np.array_equal(bytes_of(place), pattern(7, NBYTES))


def test_nothing_of_a_process_reaches_its_successor(driver: str, engine: TransferEngine) -> None:
    """Another process at the same address, with a region of the same number: old descriptors are refused."""
    options = {"tcp": {"port_min": free_port()}} if driver == "tcp" else {}
    config = TransferConfig(drivers=(driver,), port=free_port(), driver_options=options)
    with PeerProcess(config) as first:
        owned = first.allocate(NBYTES, 1)
        remote = engine.import_region(owned.descriptor)
        begin(engine, "write", remote, ALL).wait(DEADLINE_S)
        running = begin(engine, "write", remote, ENDLESS)
        wait_until(lambda: running.bytes_done > 0, "it writes")
        first.kill()
    with PeerProcess(config) as second:
        assert second.address == first.address
        successor = second.allocate(NBYTES, 2)
        for way in ("write", "read"):
            with pytest.raises((PeerUnreachable, PeerRestarted, RegionRefused)):
                begin(engine, way, remote, ALL).wait(LOSS_S)
        with pytest.raises((PeerUnreachable, PeerRestarted, RegionRefused)):
            running.wait(LOSS_S)
        with pytest.raises(PeerRestarted, match=second.address):
            engine.import_region(owned.descriptor)
        assert second.digest(successor.number) == digest(pattern(2, NBYTES))
        begin(engine, "write", engine.import_region(successor.descriptor), ALL).wait(DEADLINE_S)


@both_ways
def test_a_region_closes_in_the_middle_of_a_transfer(
    engine: TransferEngine, peer: PeerProcess, driver: str, way: str
) -> None:
    """The initiator is refused, by name; the memory is the owner's alone again."""
    owned = peer.allocate(NBYTES, 1)
    transfer = begin_endless(engine, way, owned)
    peer.close_region(owned.number, DEADLINE_S)
    peer.fill(owned.number, 9)
    with pytest.raises(RegionRefused) as caught:
        transfer.wait(DEADLINE_S)
    check_names(caught.value, peer, driver, REVOKED)
    assert peer.digest(owned.number) == digest(pattern(9, NBYTES))


# ---- processes that end or fork with an engine in use

SCRIPT = """
import base64, os, sys, time
import numpy as np
from mooncake_transfer import TransferConfig, TransferEngine

driver, descriptor = sys.argv[1], base64.b64decode(sys.argv[2])
nbytes = 4 << 20
engine = TransferEngine(TransferConfig(drivers=(driver,)))
remote = engine.import_region(descriptor)
local = engine.allocate(nbytes)
engine.read(local, remote, [[0, 0, nbytes]]).wait(20)
blocks = np.tile(np.array([[0, 0, nbytes]], np.uint64), (1 << 14, 1))
"""
IN_FLIGHT = """
transfers = [engine.write(local, remote, blocks), engine.read(engine.allocate(nbytes), remote, blocks)]
while not any(transfer.bytes_done for transfer in transfers):
    pass
"""
# Each process says when it has nothing left to do, on a clock that all of them share.
NOTHING_LEFT = "print(time.monotonic(), flush=True)\n"
ENDINGS = {
    "the main thread returns": IN_FLIGHT + NOTHING_LEFT,
    "a thread waits": IN_FLIGHT + "import contextlib, threading\n"
    "def wait():\n"
    "    with contextlib.suppress(Exception):\n"
    "        transfers[0].wait()\n"
    "threading.Thread(target=wait, daemon=True).start()\n" + NOTHING_LEFT,
    "an exit code is given": IN_FLIGHT + NOTHING_LEFT + "sys.exit(0)\n",
    "a forked child returns": "import warnings\nwarnings.simplefilter('ignore')\n"
    "child = os.fork()\n"
    "if child:\n"
    "    assert os.waitpid(child, 0)[1] == 0\n"
    "    engine.read(local, remote, [[0, 0, nbytes]]).wait(20)\n" + NOTHING_LEFT,
    "a forked child closes the engine": "import warnings\nwarnings.simplefilter('ignore')\n"
    "child = os.fork()\n"
    "if child == 0:\n"
    "    engine.close()\n"
    "else:\n"
    "    assert os.waitpid(child, 0)[1] == 0\n"
    "    engine.read(local, remote, [[0, 0, nbytes]]).wait(20)\n" + NOTHING_LEFT,
    "a child is forked in mid-transfer": IN_FLIGHT + "import warnings\nwarnings.simplefilter('ignore')\n"
    "child = os.fork()\n"
    "if child:\n"
    "    assert os.waitpid(child, 0)[1] == 0\n" + NOTHING_LEFT,
}


def shared_memory_files() -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return {entry.name for entry in Path("/dev/shm").iterdir()}
    return set()


def check_no_file_stays(before: set[str]) -> None:
    """Of those that have appeared; other tests make some meanwhile, too, and remove them."""
    appeared = shared_memory_files() - before
    wait_until(lambda: appeared.isdisjoint(shared_memory_files()), f"none of {appeared} stays", 60.0)


@pytest.mark.parametrize("ending", ENDINGS, ids=list(ENDINGS))
def test_an_interpreter_ends_at_once_whatever_is_in_flight(
    peer: PeerProcess, engine: TransferEngine, driver: str, ending: str
) -> None:
    """Exit code 0, soon, no word on standard error, no file left; its peer serves others as before."""
    owned = peer.allocate(NBYTES, 1)
    files = shared_memory_files()
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + ENDINGS[ending], driver, base64.b64encode(owned.descriptor).decode()],
        capture_output=True,
        text=True,
        timeout=EXIT_S,
        check=False,
        start_new_session=True,
    )
    gone = time.monotonic()
    assert (ended.returncode, ended.stderr) == (0, "")
    moments = [*map(float, ended.stdout.split()), gone]  # a forked child's, which is waited for, comes first
    assert len(moments) == (3 if "fork" in ending else 2)
    assert max(np.diff(moments)) < AT_ONCE_S
    check_no_file_stays(files)
    begin(engine, "write", engine.import_region(owned.descriptor), ALL).wait(DEADLINE_S)


def test_a_killed_process_leaves_no_shared_memory(driver: str) -> None:
    files = shared_memory_files()
    with PeerProcess(TransferConfig(drivers=(driver,))) as peer:
        peer.allocate(NBYTES, 1)
        peer.kill()
    check_no_file_stays(files)


def test_a_wait_beyond_its_deadline_names_what_it_waited_for(
    engine: TransferEngine, peer: PeerProcess, driver: str
) -> None:
    transfer = begin_endless(engine, "write", peer.allocate(NBYTES, 1))
    with pytest.raises(TransferError) as caught:
        transfer.wait(0.05)
    check_names(caught.value, peer, driver, WAITS)
