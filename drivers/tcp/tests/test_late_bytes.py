"""Bytes of writes that were cancelled or lost never land on those of a later write that succeeded."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mooncake_driver_tcp.testing import Address, Client, Frame, Op
from mooncake_transfer import Region, RemoteRegion, TransferConfig, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, TransferError, TransferTimeout
from mooncake_transfer.testing.fixtures import wait_until
from mooncake_transfer.testing.owner import OwnedRegion
from mooncake_transfer.testing.pattern import digest
from mooncake_transfer.testing.peer_process import PeerProcess

MIB = 1 << 20
CONNECTIONS = 2
SLICE = 8 * MIB  # more than sockets hold
NBYTES = CONNECTIONS * SLICE
PART = 64 << 10
DEADLINE_S = 30.0
LATE_S = 0.2  # within which bytes that come too late have come
ROUNDS = 3

Start = Callable[..., TransferEngine]
AddressOf = Callable[[TransferEngine], Address]


class Writer:
    """An engine that writes to a region of a process which can be stopped."""

    def __init__(self, engine: TransferEngine, peer: PeerProcess) -> None:
        self.engine = engine
        self.peer = peer
        self.owned: OwnedRegion = peer.allocate(NBYTES, seed=0)
        self.remote: RemoteRegion = engine.import_region(self.owned.descriptor)
        self.local: Region = engine.allocate(NBYTES, prefault=True)
        self.memory = np.frombuffer(self.local.view(), dtype=np.uint8)
        self.expected = np.empty(NBYTES, dtype=np.uint8)

    def write_all(self, seed: int) -> None:
        self.memory[:] = self.expected[:] = seed
        self.engine.write(self.local, self.remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)

    def pause(self) -> None:
        """Stop the peer, and wait until each of its threads has stopped."""
        self.peer.pause()
        threads = [*Path(f"/proc/{self.peer.pid}/task").iterdir()]
        wait_until(
            lambda: all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in threads),
            "the peer has stopped",
        )

    def write_again(self, first: int, nbytes: int, seed: int) -> None:
        """Write a part anew, resume the peer in the middle of it, and check what the part holds later."""
        self.memory[:nbytes] = self.expected[first : first + nbytes] = seed
        again = self.engine.write(self.local, self.remote, [[0, first, nbytes]])
        self.peer.resume()
        again.wait(DEADLINE_S)
        until = time.monotonic() + LATE_S
        while time.monotonic() < until:
            self.engine.read(self.local, self.remote, [[0, first, nbytes]]).wait(DEADLINE_S)
            assert np.unique(self.memory[:nbytes]).tolist() == [seed]


@pytest.fixture
def writer(start: Start) -> Iterator[Writer]:
    with PeerProcess(TransferConfig(drivers=("tcp",))) as peer:
        try:
            yield Writer(start(connections=CONNECTIONS, slice_bytes=SLICE), peer)
        finally:
            with contextlib.suppress(ProcessLookupError):
                peer.resume()


@contextlib.contextmanager
def lanes(writer: Writer) -> Iterator[list[socket.socket]]:
    """The driver's connections to the peer that stand now."""
    channel = int(writer.peer.address.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        found = []
        for entry in Path("/proc/self/fd").iterdir():
            # Others than sockets must not even be copied: the peer lives as long as our ends of its pipes.
            with contextlib.suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                copy = stack.enter_context(socket.socket(fileno=os.dup(int(entry.name))))
                if copy.family == socket.AF_INET and copy.getpeername()[1] != channel:
                    found.append(copy)
        yield found


def shut_down_lanes(writer: Writer) -> None:
    """End the driver's connections to the peer, as a network would."""
    with lanes(writer) as found:
        # All were found before the first one ends: the driver gives up the others with it.
        assert len(found) == CONNECTIONS
        for lane in found:
            with contextlib.suppress(OSError):  # the driver was faster
                lane.shutdown(socket.SHUT_RDWR)


def write_until_every_lane_stands(writer: Writer, seed: int) -> None:
    """Write with that seed; a lane that was lost comes back when it is needed, and one may be enough."""

    def they_stand() -> bool:
        writer.write_all(seed)
        with lanes(writer) as found:
            return len(found) == CONNECTIONS

    wait_until(they_stand, "every connection stands")


def test_a_cancelled_write_never_lands_on_a_later_one(writer: Writer) -> None:
    for seed in range(1, ROUNDS + 1):
        writer.write_all(seed)
        writer.pause()
        # One slice, so one connection: most of it is sent once the peer runs, its end last of all. The other
        # connection is free to take what comes next.
        writer.memory[:] = 0xAA
        with pytest.raises(TransferTimeout):
            writer.engine.write(writer.local, writer.remote, [[0, 0, SLICE]]).wait(0.2)
        writer.write_again(SLICE - PART, PART, seed + 100)


def test_a_write_of_a_lost_connection_never_lands_on_a_later_one(writer: Writer) -> None:
    for seed in range(1, ROUNDS + 1):
        write_until_every_lane_stands(writer, seed)
        writer.pause()
        writer.memory[:] = 0xAA
        lost = writer.engine.write(writer.local, writer.remote, [[0, 0, NBYTES]])
        time.sleep(0.2)  # the sockets fill
        shut_down_lanes(writer)
        with pytest.raises(PeerUnreachable):
            lost.wait(DEADLINE_S)
        writer.write_again(0, SLICE, seed + 100)


def test_small_writes_that_were_cancelled_never_land_on_later_ones(writer: Writer) -> None:
    small = [[i * PART, i * PART, PART] for i in range(256)]  # of the connection that no worker owns
    for seed in range(1, ROUNDS + 1):
        writer.write_all(seed)
        writer.memory[:] = writer.expected[:] = seed + 50
        writer.engine.write(writer.local, writer.remote, small).wait(DEADLINE_S)
        writer.pause()
        writer.memory[:] = 0xAA
        with pytest.raises(TransferTimeout):
            writer.engine.write(writer.local, writer.remote, small).wait(0.2)
        writer.write_again(0, SLICE, seed + 100)


def test_operations_behind_the_fence_end_by_their_own_deadlines(writer: Writer) -> None:
    write_until_every_lane_stands(writer, 1)
    writer.pause()
    with pytest.raises(TransferTimeout):
        writer.engine.write(writer.local, writer.remote, [[0, 0, SLICE]]).wait(0.1)
    shut_down_lanes(writer)
    with pytest.raises(TransferTimeout):
        writer.engine.write(writer.local, writer.remote, [[0, 0, SLICE]]).wait(0.1)
    writer.peer.resume()
    writer.write_all(2)
    assert writer.peer.digest(writer.owned.number) == digest(writer.expected)


def test_writes_behind_a_lost_connection_fail_when_it_does_not_come_back(writer: Writer) -> None:
    writer.write_all(1)
    writer.pause()
    lost = writer.engine.write(writer.local, writer.remote, [[0, 0, NBYTES]])
    with pytest.raises(TransferTimeout):
        writer.engine.write(writer.local, writer.remote, [[0, 0, PART]]).wait(0.2)
    writer.peer.kill()
    with pytest.raises(PeerUnreachable):
        lost.wait(DEADLINE_S)
    with pytest.raises(PeerUnreachable):
        writer.engine.write(writer.local, writer.remote, [[0, 0, PART]]).wait(DEADLINE_S)


def test_writes_that_time_out_behind_a_stopped_peer_leave_no_memory(writer: Writer) -> None:
    def submit_and_cancel(rounds: int) -> None:
        for _ in range(rounds):
            blocks = np.tile(np.array([[0, 0, 1]], dtype=np.uint64), (20_000, 1))
            transfer = writer.engine.write(writer.local, writer.remote, blocks)
            transfer.cancel()
            with contextlib.suppress(TransferError):
                transfer.wait(DEADLINE_S)

    writer.write_all(1)
    writer.pause()
    with pytest.raises(TransferTimeout):
        writer.engine.write(writer.local, writer.remote, [[0, 0, NBYTES]]).wait(0.2)
    submit_and_cancel(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    submit_and_cancel(10)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    writer.peer.resume()
    assert grown < 16 << 10, "KiB; 200,000 operations that linger take 38 MiB"
    writer.write_all(2)


# ---- the target's side, by hand


def hello(client: Client, address: Address, lane: int, generation: int, session: int = 7) -> None:
    client.send(Frame(Op.HELLO, flags=lane, region=session, key=address.nonce, offset=generation))


@pytest.fixture
def clients(engine: TransferEngine, address_of: AddressOf) -> Iterator[Callable[[], Client]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Client(address_of(engine).port))


def test_a_hello_ends_the_older_connections_of_its_lane_before_it_is_answered(
    engine: TransferEngine, address_of: AddressOf, clients: Callable[[], Client]
) -> None:
    address = address_of(engine)
    others = [clients() for _ in range(3)]
    hello(others[0], address, lane=1, generation=1)
    hello(others[1], address, lane=0, generation=1, session=8)
    assert others[2].greet(address.nonce) == Frame(Op.WELCOME)
    assert [other.answer() for other in others[:2]] == [Frame(Op.WELCOME)] * 2
    region = engine.allocate(4096)
    number = msgspec.msgpack.decode(region.descriptor())[4]
    write = Frame(Op.WRITE, region=number, key=region.key, length=4096)
    lane = clients()
    hello(lane, address, lane=0, generation=1)
    for generation in range(2, 10):  # over all workers
        assert lane.answer() == Frame(Op.WELCOME)
        lane.send(replace(write, seq=1), b"first")
        older, lane = lane, clients()
        hello(lane, address, lane=0, generation=generation)
        assert older.is_dropped()
    assert lane.answer() == Frame(Op.WELCOME)
    lane.send(replace(write, seq=1, length=5), b"later")
    assert lane.answer() == Frame(Op.WRITE_DONE, seq=1)
    with contextlib.suppress(OSError):  # it is closed at the other end
        older.socket.sendall(b"x" * 4091)
    assert bytes(region.view()[:6]) == b"later\0"
    for other in others:
        other.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.is_dropped()


def test_a_hello_that_comes_after_a_newer_one_is_dropped(
    engine: TransferEngine, address_of: AddressOf, clients: Callable[[], Client]
) -> None:
    newer, older = clients(), clients()
    hello(newer, address_of(engine), lane=0, generation=2)
    assert newer.answer() == Frame(Op.WELCOME)
    hello(older, address_of(engine), lane=0, generation=1)
    assert older.is_dropped()
    newer.socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        newer.is_dropped()
