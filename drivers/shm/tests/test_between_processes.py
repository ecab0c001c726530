"""What only two real processes can show: mappings, foreign memory, revocation, users and death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, RegionRefused, TransferError

NBYTES = 4 << 20
NOBODY = 65534
WHOLE = [[0, 0, NBYTES]]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")


def mapped_peer_memory() -> int:
    """How often the memory that peers call "peers-memory" is mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:mooncake-peers-memory")


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


@pytest.mark.parametrize("kind", ["allocated", "foreign"])
def test_bytes_of_any_number_go_to_a_peer_and_back(
    engine: TransferEngine, start_peer: Callable[..., Any], kind: str
) -> None:
    peer = start_peer(kind)
    memory = np.zeros(NBYTES, np.uint8)
    local, remote = engine.register(memory), engine.import_region(peer.descriptor)
    for length in (1, 4095, 65536, 65537, (1 << 20) + 1, NBYTES):
        memory[:] = 3
        engine.read(local, remote, [[NBYTES - length, 0, length]]).wait()
        assert (memory[NBYTES - length :] == 7).all()
        assert (memory[: NBYTES - length] == 3).all()
        memory[:] = 5
        transfer = engine.write(local, remote, [[0, NBYTES - length, length]])
        transfer.wait()
        assert transfer.bytes_by_driver == {"shm": length}
        assert peer.ask("sum") == 7 * (NBYTES - length) + 5 * length
        memory[:] = 7
        engine.write(local, remote, WHOLE).wait()


def test_allocated_memory_is_mapped_and_let_go_when_its_owner_takes_it_back(
    engine: TransferEngine, start_peer: Callable[..., Any]
) -> None:
    peer = start_peer("allocated")
    local, remote = engine.allocate(NBYTES), engine.import_region(peer.descriptor)
    engine.read(local, remote, WHOLE).wait()
    assert mapped_peer_memory() == 1
    peer.ask("close")
    wait_until(lambda: mapped_peer_memory() == 0, "the peer's memory is not mapped any more")


def test_foreign_memory_is_not_mapped(engine: TransferEngine, start_peer: Callable[..., Any]) -> None:
    peer = start_peer("foreign")
    engine.read(engine.allocate(NBYTES), engine.import_region(peer.descriptor), WHOLE).wait()
    assert mapped_peer_memory() == 0


@pytest.mark.parametrize("kind", ["allocated", "foreign"])
def test_a_revoked_region_is_refused(
    engine: TransferEngine, start_peer: Callable[..., Any], kind: str
) -> None:
    peer = start_peer(kind)
    descriptor = peer.descriptor
    local, remote = engine.allocate(NBYTES), engine.import_region(descriptor)
    engine.read(local, remote, WHOLE).wait()
    peer.ask("close")
    for length in (16, NBYTES):  # on the spot, and by the workers
        with pytest.raises(RegionRefused, match="deregistered"):
            engine.read(local, remote, [[0, 0, length]]).wait()
    with pytest.raises(RegionRefused, match="not registered"):
        engine.read(local, engine.import_region(descriptor), WHOLE).wait()


@pytest.mark.parametrize("kind", ["allocated", "foreign"])
def test_no_byte_arrives_once_closing_a_region_has_returned(
    engine: TransferEngine, start_peer: Callable[..., Any], kind: str
) -> None:
    peer = start_peer(kind)
    local, remote = engine.allocate(NBYTES), engine.import_region(peer.descriptor)
    engine.write(local, remote, WHOLE).wait()
    running = [engine.write(local, remote, WHOLE) for _ in range(64)]
    peer.ask("close")
    peer.ask("fill")
    for transfer in running:
        try:
            transfer.wait()
        except RegionRefused:
            continue
    assert peer.ask("sum") == 9 * NBYTES


def test_a_wrong_key_is_refused_and_the_right_one_still_works(
    engine: TransferEngine, start_peer: Callable[..., Any]
) -> None:
    peer = start_peer()
    with TransferEngine(TransferConfig(drivers=("shm",))) as owner:
        region = owner.allocate(NBYTES)
        descriptor = region.descriptor()
        for position in (0, 15):
            wrong = bytearray(region.key)
            wrong[position] ^= 1
            forged = engine.import_region(descriptor.replace(region.key, bytes(wrong)))
            with pytest.raises(RegionRefused, match="wrong access key"):
                engine.read(engine.allocate(16), forged, [[0, 0, 16]]).wait()
        engine.read(engine.allocate(16), engine.import_region(descriptor), [[0, 0, 16]]).wait()
    assert peer.ask("sum") == 7 * NBYTES


@pytest.mark.parametrize("kind", ["allocated", "foreign"])
def test_a_killed_peer_is_unreachable_and_leaves_nothing(
    engine: TransferEngine, start_peer: Callable[..., Any], kind: str
) -> None:
    peer = start_peer(kind)
    local, remote = engine.allocate(NBYTES), engine.import_region(peer.descriptor)
    engine.write(local, remote, WHOLE).wait()
    name = socket_name_of(peer.process.pid)
    assert "/dev/shm/" not in Path(f"/proc/{peer.process.pid}/maps").read_text()
    peer.kill()
    for length in (16, NBYTES):  # the mapping is still there, but nobody is behind it
        with pytest.raises(PeerUnreachable):
            engine.write(local, remote, [[0, 0, length]]).wait()
    assert name not in socket_names().values()
    wait_until(lambda: mapped_peer_memory() == 0, "the peer's memory is not mapped any more")


def test_a_peer_that_does_not_answer_fails_the_transfer_in_time(start_peer: Callable[..., Any]) -> None:
    options = {"shm": {"answer_timeout_s": 0.3}}
    with TransferEngine(TransferConfig(drivers=("shm",), driver_options=options)) as engine:
        peer = start_peer()
        granted, other = engine.import_region(peer.descriptor), bytes.fromhex(peer.ask("describe another"))
        local = engine.allocate(16)
        engine.read(local, granted, [[0, 0, 16]]).wait()
        peer.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)  # all of its threads
        try:
            engine.read(local, granted, [[0, 0, 16]]).wait()  # needs no answer
            started = time.monotonic()
            with pytest.raises(PeerUnreachable, match="did not answer in time"):
                engine.read(local, engine.import_region(other), [[0, 0, 16]]).wait()
            assert time.monotonic() - started < 5
        finally:
            peer.process.send_signal(signal.SIGCONT)


@needs_root
def test_a_process_of_another_user_is_turned_away(
    engine: TransferEngine, start_peer: Callable[..., Any]
) -> None:
    peer = start_peer(uid=NOBODY)
    remote = engine.import_region(peer.descriptor)
    with pytest.raises(TransferError, match="serves only processes of user 65534"):
        engine.read(engine.allocate(16), remote, [[0, 0, 16]]).wait()


@needs_root
def test_a_process_of_another_user_is_served_where_the_owner_allows_it(
    engine: TransferEngine, start_peer: Callable[..., Any]
) -> None:
    peer = start_peer(uid=NOBODY, allow_other_users=True)
    engine.read(engine.allocate(NBYTES), engine.import_region(peer.descriptor), WHOLE).wait()
    assert mapped_peer_memory() == 1
