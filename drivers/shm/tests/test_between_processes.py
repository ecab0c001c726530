"""What only two real processes can show: mappings, foreign memory, revocation, users and death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, RegionRefused, TransferError
from mooncake_transfer.testing import PeerProcess, digest, pattern

NBYTES = 4 << 20
NOBODY = 65534
WHOLE = [[0, 0, NBYTES]]
SEED, LAST_SEED = 1, 2
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
# Allocated by the engine: mapped here. Memory that the user brought: reached by process_vm_readv and _writev.
both_kinds = pytest.mark.parametrize("kind", ["engine", "numpy"])


def mapped(name: str) -> bool:
    """Whether memory that a peer allocated under this name is mapped here."""
    return f"memfd:mooncake-{name} " in Path("/proc/self/maps").read_text()


def socket_names() -> dict[str, str]:
    """The names that sockets of shm drivers have on this host, by inode."""
    fields = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[6]: line[7] for line in fields if line[-1].startswith("@mooncake-shm-")}


def socket_name_of(pid: int) -> str:
    """The name of the socket on which a process listens."""
    names = socket_names()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        kind, _, inode = str(descriptor.readlink()).partition(":")
        if kind == "socket" and inode.strip("[]") in names:
            return names[inode.strip("[]")]
    raise AssertionError(f"process {pid} listens on no socket of the shm driver")


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"after {limit_s} s still not so: {what}"
        time.sleep(0.01)


def test_allocated_memory_is_mapped_and_let_go_when_its_owner_takes_it_back(
    engine: TransferEngine, peer: PeerProcess
) -> None:
    owned = peer.allocate(NBYTES, SEED)
    local, remote = engine.allocate(NBYTES), engine.import_region(owned.descriptor)
    engine.read(local, remote, WHOLE).wait()
    assert mapped(remote.name)
    peer.close_region(owned.number, 10)
    wait_until(lambda: not mapped(remote.name), "the peer's memory is not mapped any more")


def test_memory_that_the_user_brought_is_not_mapped(engine: TransferEngine, peer: PeerProcess) -> None:
    remote = engine.import_region(peer.allocate(NBYTES, SEED, "numpy").descriptor)
    local = engine.allocate(NBYTES)
    transfer = engine.read(local, remote, WHOLE)
    transfer.wait()
    assert transfer.bytes_by_driver == {"shm": NBYTES}
    assert np.array_equal(np.frombuffer(local.view(), np.uint8), pattern(SEED, NBYTES))
    assert not mapped(remote.name)


@both_kinds
def test_a_withdrawn_region_is_refused_with_that_reason(
    engine: TransferEngine, peer: PeerProcess, kind: str
) -> None:
    owned = peer.allocate(NBYTES, SEED, kind)
    local, remote = engine.allocate(NBYTES), engine.import_region(owned.descriptor)
    engine.read(local, remote, WHOLE).wait()
    peer.close_region(owned.number, 10)
    for length in (16, NBYTES):  # on the spot, and by the workers
        with pytest.raises(RegionRefused, match="deregistered"):
            engine.read(local, remote, [[0, 0, length]]).wait()
    # Whether the peer is asked again depends on who is first: this, or its notice that the region is gone.
    with pytest.raises(RegionRefused, match=r"deregistered|not registered"):
        engine.read(local, engine.import_region(owned.descriptor), WHOLE).wait()


@both_kinds
def test_no_byte_arrives_once_closing_a_region_has_returned(
    engine: TransferEngine, peer: PeerProcess, kind: str
) -> None:
    for _ in range(5):
        owned = peer.allocate(NBYTES, SEED, kind)
        local, remote = engine.allocate(NBYTES), engine.import_region(owned.descriptor)
        engine.write(local, remote, WHOLE).wait()
        running = [engine.write(local, remote, WHOLE) for _ in range(64)]
        peer.close_region(owned.number, 10)
        peer.fill(owned.number, LAST_SEED)
        for transfer in running:
            try:
                transfer.wait()
            except RegionRefused:
                continue
        assert peer.digest(owned.number) == digest(pattern(LAST_SEED, NBYTES))


@both_kinds
def test_a_killed_peer_is_unreachable_and_leaves_nothing(
    engine: TransferEngine, peer: PeerProcess, kind: str
) -> None:
    remote = engine.import_region(peer.allocate(NBYTES, SEED, kind).descriptor)
    local = engine.allocate(NBYTES)
    engine.write(local, remote, WHOLE).wait()
    socket = socket_name_of(peer.pid)
    assert "/dev/shm/" not in Path(f"/proc/{peer.pid}/maps").read_text()
    peer.kill()
    for length in (16, NBYTES):  # a mapping would still be there, but nobody is behind it
        with pytest.raises(PeerUnreachable):
            engine.write(local, remote, [[0, 0, length]]).wait()
    assert socket not in socket_names().values()
    wait_until(lambda: not mapped(remote.name), "the peer's memory is not mapped any more")


def test_a_peer_that_does_not_answer_fails_only_what_needs_an_answer(peer: PeerProcess) -> None:
    options = {"shm": {"answer_timeout_s": 0.3}}
    with TransferEngine(TransferConfig(drivers=("shm",), driver_options=options)) as engine:
        granted = engine.import_region(peer.allocate(NBYTES, SEED).descriptor)
        other = peer.allocate(NBYTES, SEED).descriptor
        local = engine.allocate(NBYTES)
        engine.read(local, granted, WHOLE).wait()
        peer.pause()
        try:
            os.waitid(os.P_PID, peer.pid, os.WSTOPPED)  # all of its threads
            engine.read(local, granted, WHOLE).wait()
            started = time.monotonic()
            with pytest.raises(PeerUnreachable, match="did not answer in time"):
                engine.read(local, engine.import_region(other), WHOLE).wait()
            assert time.monotonic() - started < 5
        finally:
            peer.resume()


PROGRAM = """
import sys
from mooncake_transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(drivers=("shm",)))
remote = engine.import_region(bytes.fromhex(sys.argv[1]))
local = engine.allocate({nbytes})
engine.write(local, remote, [[0, 0, {nbytes}]]).wait()
transfers = [engine.write(local, remote, [[0, 0, {nbytes}]]) for _ in range(500)]
"""


def test_an_interpreter_exits_promptly_with_transfers_in_flight(peer: PeerProcess) -> None:
    shared = set(Path("/dev/shm").iterdir())
    owned = peer.allocate(NBYTES, SEED)
    command = [sys.executable, "-c", PROGRAM.format(nbytes=NBYTES), owned.descriptor.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    appeared = set(Path("/dev/shm").iterdir()) - shared  # of other tests, too, which remove theirs
    wait_until(lambda: appeared.isdisjoint(Path("/dev/shm").iterdir()), "no file stays in /dev/shm", 60)
    peer.fill(owned.number, LAST_SEED)
    assert peer.digest(owned.number) == digest(pattern(LAST_SEED, NBYTES))


@needs_root
def test_a_process_of_another_user_is_told_that_it_is_not_served(
    engine: TransferEngine, region_of_another_user: Callable[..., bytes]
) -> None:
    remote = engine.import_region(region_of_another_user(NOBODY, NBYTES))
    with pytest.raises(TransferError, match="serves only processes of user 65534"):
        engine.read(engine.allocate(16), remote, [[0, 0, 16]]).wait()


@needs_root
def test_a_process_of_another_user_is_served_where_the_owner_allows_it(
    engine: TransferEngine, region_of_another_user: Callable[..., bytes]
) -> None:
    remote = engine.import_region(region_of_another_user(NOBODY, NBYTES, allow_other_users=True))
    local = engine.allocate(NBYTES)
    engine.read(local, remote, WHOLE).wait()
    assert (np.frombuffer(local.view(), np.uint8) == 7).all()
    assert mapped(remote.name)
