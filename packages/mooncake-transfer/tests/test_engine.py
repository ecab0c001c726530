"""The engine as users meet it, with real drivers, two engines in one process."""

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_transfer import Caller, Region, RemoteRegion, TransferConfig, TransferEngine, _wire
from mooncake_transfer.errors import (
    ConfigError,
    EngineClosed,
    MemoryUnavailable,
    PeerIncompatible,
    PeerRestarted,
    PeerUnreachable,
    RegionClosed,
    RegionRefused,
    RemoteError,
    TransferError,
)

DEADLINE_S = 10.0
MIB = 1 << 20


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with TransferEngine() as here, TransferEngine() as there:
        yield here, there


def share(here: TransferEngine, there: TransferEngine, nbytes: int) -> tuple[Region, Region, RemoteRegion]:
    """A region of each engine, and the second one as the first engine reaches it."""
    local, owned = here.allocate(nbytes, name="local"), there.allocate(nbytes, name="owned")
    return local, owned, here.import_region(owned.descriptor())


def test_shared_memory_is_preferred_on_one_host(engines: tuple[TransferEngine, TransferEngine]) -> None:
    local, owned, remote = share(*engines, MIB)
    owned.view()[:] = bytes(range(256)) * (MIB // 256)
    transfer = engines[0].read(local, remote, [[0, 0, MIB]])
    transfer.wait(DEADLINE_S)
    assert local.view() == owned.view()
    assert transfer.bytes_by_driver == {"shm": MIB}
    assert (transfer.nbytes, transfer.bytes_done) == (MIB, MIB)
    assert transfer.seconds > 0


def test_an_engine_without_shm_reaches_one_that_has_it_over_tcp() -> None:
    with TransferEngine(TransferConfig(drivers=("tcp",))) as here, TransferEngine() as there:
        local, owned, remote = share(here, there, 4096)
        local.view()[:] = b"x" * 4096
        transfer = here.write(local, remote, [[0, 0, 4096]])
        transfer.wait(DEADLINE_S)
        assert bytes(owned.view()) == b"x" * 4096
        assert transfer.bytes_by_driver == {"tcp": 4096}


def test_contiguous_rows_move_as_one_and_empty_rows_are_skipped(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    local, owned, remote = share(*engines, MIB)
    owned.view()[:] = np.random.default_rng(1).bytes(MIB)
    rows = np.array([[i * 64, i * 64, 64 * (i % 3 != 0)] for i in range(1000)], dtype=np.uint64)
    transfer = engines[0].read(local, remote, rows)
    transfer.wait(DEADLINE_S)
    for start, _, length in rows.tolist():
        assert local.view()[start : start + length] == owned.view()[start : start + length]
    assert transfer.nbytes == int(rows[:, 2].sum())
    engines[0].read(local, remote, []).wait(0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 1, 4096], "owned"),
        ([1, 0, 4096], "local"),
        ([0, 4097, 0], "owned"),
        ([2**63, 0, 8], "local"),
        ([0, 2**64 - 8, 16], "owned"),
    ],
)
def test_a_row_outside_a_region_is_refused_before_anything_moves(
    engines: tuple[TransferEngine, TransferEngine], row: list[int], message: str
) -> None:
    local, _, remote = share(*engines, 4096)
    with pytest.raises(RegionRefused, match=f"outside.*{message}"):
        engines[0].read(local, remote, np.array([[0, 0, 8], row], dtype=np.uint64))


@pytest.mark.parametrize("blocks", [[[0, 0]], [0, 0, 8], [[0.5, 0, 8]], [[-1, 0, 8]], "abc"])
def test_blocks_of_another_shape_or_type_are_refused(
    engines: tuple[TransferEngine, TransferEngine], blocks: object
) -> None:
    local, _, remote = share(*engines, 4096)
    with pytest.raises(ConfigError, match="blocks"):
        engines[0].write(local, remote, blocks)  # type: ignore[arg-type]


def test_a_region_reached_by_name_needs_its_key(engines: tuple[TransferEngine, TransferEngine]) -> None:
    here, there = engines
    owned = there.allocate(4096, name="kv")
    peer = here.connect(there.address)
    assert peer.region("kv", owned.key).nbytes == 4096
    with pytest.raises(RegionRefused, match="'kv'"):
        peer.region("kv", bytes(16))
    with pytest.raises(RegionRefused, match="'other'"):
        peer.region("other", owned.key)


def test_a_closed_region_is_refused_on_both_sides(engines: tuple[TransferEngine, TransferEngine]) -> None:
    local, owned, remote = share(*engines, 4096)
    owned.close()
    owned.close()
    with pytest.raises(RegionClosed):
        owned.descriptor()
    with pytest.raises(RegionRefused):
        engines[0].read(local, remote, [[0, 0, 64]]).wait(DEADLINE_S)
    local.close()
    with pytest.raises(RegionClosed):
        engines[0].read(local, remote, [[0, 0, 64]])


def test_a_descriptor_of_an_engine_that_is_gone_is_never_used_with_its_successor() -> None:
    with TransferEngine() as here:
        first = TransferEngine()
        port = int(first.address.rpartition(":")[2])
        descriptor = first.allocate(4096).descriptor()
        first.close()
        with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1"):
            here.import_region(descriptor)
        with TransferEngine(TransferConfig(port=port)), pytest.raises(PeerRestarted, match="another process"):
            here.import_region(descriptor)


def test_registered_memory_of_the_user_is_used_in_place(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    here, there = engines
    array = np.zeros((16, 64), dtype=np.float32)
    local = here.register(array)
    owned = there.allocate(local.nbytes)
    owned.view().cast("B")[:] = np.arange(1024, dtype=np.float32).tobytes()
    here.read(local, here.import_region(owned.descriptor()), [[0, 0, local.nbytes]]).wait(DEADLINE_S)
    assert array.reshape(-1).tolist() == list(range(1024))


@pytest.mark.parametrize("memory", [b"read only", bytearray(), np.zeros((4, 4))[:, ::2], 17, None])
def test_memory_that_cannot_be_registered_is_refused(
    engines: tuple[TransferEngine, TransferEngine], memory: object
) -> None:
    with pytest.raises(ConfigError, match="cannot register"):
        engines[0].register(memory)


def test_more_memory_than_there_is_is_refused_with_the_numbers(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    with pytest.raises(MemoryUnavailable, match=r"'huge'.*available"):
        engines[0].allocate(1 << 50, name="huge")
    with pytest.raises(ConfigError, match="positive"):
        engines[0].allocate(0)


def test_prefaulted_memory_is_resident_before_it_is_touched(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    region = engines[0].allocate(64 * MIB, prefault=True)
    assert resident_bytes() - before > 60 * MIB
    assert bytes(region.view()[:8]) == bytes(8)


def test_calls_notifications_and_failures_reach_the_other_side(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    here, there = engines
    seen: list[tuple[bytes, Caller]] = []
    arrived = threading.Event()

    def note(payload: bytes, caller: Caller) -> None:
        seen.append((payload, caller))
        arrived.set()

    def fail(payload: bytes, caller: Caller) -> bytes:
        raise KeyError(payload.decode())

    there.serve("echo", lambda payload, caller: payload + caller.address.encode())
    there.serve("note", note)
    there.serve("fail", fail)
    peer = here.connect(there.address)
    assert peer.call("echo", b"from ") == b"from " + here.address.encode()
    peer.notify("note", b"hey")
    assert arrived.wait(DEADLINE_S)
    assert seen[0][0] == b"hey"
    assert seen[0][1].epoch == here.epoch
    with pytest.raises(RemoteError, match="no such thing") as failure:
        peer.call("fail", b"no such thing")
    assert failure.value.kind == "KeyError"
    with pytest.raises(RemoteError, match="no handler for 'nothing'"):
        peer.call("nothing")
    with pytest.raises(ConfigError, match="already has a handler"):
        there.serve("echo", fail)


def test_the_owner_learns_that_a_peer_is_gone(engines: tuple[TransferEngine, TransferEngine]) -> None:
    lost: list[Caller] = []
    gone = threading.Event()

    def note(caller: Caller) -> None:
        lost.append(caller)
        gone.set()

    engines[1].on_peer_lost(note)
    with TransferEngine() as visitor:
        visitor.connect(engines[1].address)
        address = visitor.address
    assert gone.wait(DEADLINE_S)
    assert [caller.address for caller in lost] == [address]


def test_every_handler_learns_of_a_lost_peer_even_when_one_of_them_fails(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    gone = threading.Event()

    def fail(caller: Caller) -> None:
        raise LookupError(caller.address)

    engines[1].on_peer_lost(fail)
    engines[1].on_peer_lost(lambda caller: gone.set())
    with TransferEngine() as visitor:
        visitor.connect(engines[1].address)
    assert gone.wait(DEADLINE_S)


def test_a_new_peer_is_answered_while_a_notification_is_still_being_handled(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    here, there = engines
    begun, release = threading.Event(), threading.Event()

    def hold(body: bytes, caller: Caller) -> None:
        begun.set()
        release.wait(DEADLINE_S)

    there.serve("hold", hold)
    there.serve("who", lambda body, caller: caller.address.encode())
    here.connect(there.address).notify("hold")
    assert begun.wait(DEADLINE_S)
    try:
        with TransferEngine() as visitor:
            answer = visitor.connect(there.address).call("who", timeout_s=2.0)
            assert answer.decode() == visitor.address
    finally:
        release.set()


def test_a_handler_that_answers_no_bytes_is_an_error_of_the_caller(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    engines[1].serve("wrong", lambda body, caller: 7)  # type: ignore[arg-type,return-value]
    peer = engines[0].connect(engines[1].address)
    for _ in range(engines[1].config.handler_threads + 1):  # no thread ends of it
        with pytest.raises(RemoteError, match="TypeError"):
            peer.call("wrong", timeout_s=DEADLINE_S)


FORKING = """
import os, sys
from mooncake_transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(drivers=("tcp",)))
engine.connect(sys.argv[1])
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(engine.address, flush=True)
sys.stdin.read()
"""


def test_the_end_of_a_peer_is_noticed_while_a_forked_child_of_it_lives(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    gone = threading.Event()
    engines[0].on_peer_lost(lambda caller: gone.set())
    command = [sys.executable, "-c", FORKING, engines[0].address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        address = peer.stdout.readline().strip()
        os.kill(peer.pid, signal.SIGKILL)
        peer.wait()
        assert gone.wait(DEADLINE_S)
        with pytest.raises(PeerUnreachable, match="refused"):  # nobody holds its port either
            engines[0].connect(address)
        peer.stdin.close()  # ends the child


def test_who_waits_for_another_threads_connection_waits_no_longer_than_it_said(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    waited_s: list[float] = []

    def connect(address: str) -> None:
        started_s = time.monotonic()
        with pytest.raises(PeerUnreachable):
            engines[0].connect(address, timeout_s=2.0)
        waited_s.append(time.monotonic() - started_s)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        threads = [threading.Thread(target=connect, args=(address,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(waited_s) == 4
    assert max(waited_s) < 6.0  # one after another, the last would have waited for 8 s


def test_nobody_at_the_address_is_an_error_that_names_it(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1"):
        engines[0].connect("127.0.0.1:1")
    with pytest.raises(ConfigError, match="host:port"):
        engines[0].connect("nowhere")


def test_a_transfer_can_be_awaited(engines: tuple[TransferEngine, TransferEngine]) -> None:
    local, owned, remote = share(*engines, 32 * MIB)
    owned.view()[-4:] = b"tail"

    async def read() -> None:
        await asyncio.gather(*[_await(engines[0].read(local, remote, [[0, 0, 32 * MIB]])) for _ in range(4)])

    async def _await(transfer: object) -> None:
        await transfer  # type: ignore[misc]

    asyncio.run(read())
    assert bytes(local.view()[-4:]) == b"tail"


def test_closing_the_engine_ends_its_transfers_and_later_calls(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    here, _ = engines
    local, _, remote = share(*engines, 64 * MIB)
    transfers = [here.read(local, remote, [[0, 0, 64 * MIB]]) for _ in range(8)]
    here.close()
    for transfer in transfers:
        try:
            transfer.wait(DEADLINE_S)
        except EngineClosed:
            continue
    calls: list[Callable[[], object]] = [
        lambda: here.allocate(4096),
        lambda: here.register_many([]),
        lambda: here.serve("late", lambda payload, caller: payload),
        lambda: here.on_peer_lost(print),
        lambda: here.enable_driver("tcp"),
        lambda: here.disable_driver("tcp"),
        here.__enter__,
    ]
    for call in calls:
        with pytest.raises(EngineClosed):
            call()
    with pytest.raises(TransferError):
        here.read(local, remote, [[0, 0, 8]])


def test_closing_a_region_waits_for_its_transfers(engines: tuple[TransferEngine, TransferEngine]) -> None:
    here, _ = engines
    local, _, remote = share(*engines, 64 * MIB)
    transfers = [here.read(local, remote, [[0, 0, 64 * MIB]]) for _ in range(8)]
    local.close(DEADLINE_S)
    for transfer in transfers:
        transfer.wait(DEADLINE_S)  # none was cut off


def test_a_peer_or_descriptor_of_another_protocol_is_refused_with_both_numbers(
    engines: tuple[TransferEngine, TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = engines
    current = there.allocate(4096).descriptor()
    with monkeypatch.context() as future:
        future.setattr(_wire, "PROTOCOL", _wire.PROTOCOL + 1)
        newer = TransferEngine()
        descriptor = there.allocate(4096).descriptor()
    with newer:
        with pytest.raises(PeerIncompatible, match=r"speaks protocol 3, this engine 2"):
            here.connect(newer.address)
        with pytest.raises(PeerIncompatible, match=r"descriptor.*protocol 3"):
            here.import_region(descriptor)
    assert here.import_region(current).nbytes == 4096
