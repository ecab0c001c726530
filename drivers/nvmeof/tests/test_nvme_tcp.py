"""The userspace initiator of NVMe/TCP, against a target of this process that enforces the protocol."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from nvme_target import NGUID, READ, UUID, WRITE, NvmeTarget

from mooncake_driver_nvmeof import namespace
from mooncake_transfer import RailConfig, Region, RemoteRegion, TransferConfig, TransferEngine
from mooncake_transfer.errors import (
    ConfigError,
    PeerUnreachable,
    RegionRefused,
    TransferError,
    TransferTimeout,
)
from mooncake_transfer.testing import pattern
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

DEADLINE_S = 20.0
NBYTES = 1 << 20


@contextmanager
def reached(
    target: NvmeTarget, nbytes: int = NBYTES, **options: Any
) -> Iterator[tuple[TransferEngine, Region, RemoteRegion]]:
    """An engine, memory of it filled with a pattern, and the target's namespace as a region."""
    digests = {name: bool(options.get(name, False)) for name in ("header_digest", "data_digest")}
    found = namespace(target.url, **digests)
    config = TransferConfig(
        drivers=("nvmeof",),
        driver_options={"nvmeof": {"fence_s": 0.0, **options}},
        rails=RailConfig(
            attempts=1, breaker_errors=1000
        ),  # what the driver reports, not what a second attempt makes of it
    )
    with TransferEngine(config) as engine:
        memory = engine.allocate(nbytes)
        bytes_of(memory)[:] = pattern(1, nbytes)
        yield engine, memory, engine.import_region(engine.register(found.source()).descriptor())


def check_round_trip(engine: TransferEngine, memory: Region, place: RemoteRegion, target: NvmeTarget) -> None:
    sent = pattern(5, memory.nbytes)
    bytes_of(memory)[:] = sent
    engine.write(memory, place, [[0, 0, memory.nbytes]]).wait(DEADLINE_S)
    assert bytes(target.memory[: memory.nbytes]) == sent.tobytes()
    bytes_of(memory)[:] = 0
    engine.read(memory, place, [[0, 0, memory.nbytes]]).wait(DEADLINE_S)
    assert np.array_equal(bytes_of(memory), sent)


def test_a_namespace_tells_what_it_is() -> None:
    with NvmeTarget(blocks=1000, block_bytes=4096) as target:
        found = namespace(target.url)
        assert (found.nbytes, found.block_bytes) == (4_096_000, 4096)
        assert (found.nguid, found.uuid, found.model, found.serial) == (NGUID, UUID, "test double", "SERIAL")
        assert "block=4096" in found.location
        with pytest.raises(ConfigError, match="do not lie in it"):
            found.source(offset=4_096_000)


@pytest.mark.parametrize(
    "digests",
    [{}, {"header_digest": True}, {"data_digest": True}, {"header_digest": True, "data_digest": True}],
)
def test_what_is_written_is_there_and_comes_back(digests: dict[str, bool]) -> None:
    with NvmeTarget() as target, reached(target, 96 << 10, **digests) as (engine, memory, place):
        check_round_trip(engine, memory, place, target)


@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_unaligned_ranges_change_no_byte_beside_them(block_bytes: int) -> None:
    with NvmeTarget(2048, block_bytes) as target, reached(target) as (engine, memory, place):
        expected = bytearray(target.memory)
        blocks = [[1, 7, 1], [10, 511, 2], [100, 5000, 40_001], [50_000, 4096 * 20 - 3, 4096 + 6]]
        engine.write(memory, place, blocks).wait(DEADLINE_S)
        sent = pattern(1, NBYTES).tobytes()
        for local, remote, length in blocks:
            expected[remote : remote + length] = sent[local : local + length]
        assert target.memory == expected
        received = engine.allocate(NBYTES)
        engine.read(received, place, blocks).wait(DEADLINE_S)
        for local, remote, length in blocks:
            assert bytes(received.view()[local : local + length]) == bytes(expected[remote : remote + length])


def test_small_writes_travel_inside_the_command_and_large_ones_when_asked_for() -> None:
    with NvmeTarget() as target, reached(target) as (engine, memory, place):
        engine.write(memory, place, [[0, 0, 8192]]).wait(DEADLINE_S)
        engine.write(memory, place, [[0, 8192, 128 << 10]]).wait(DEADLINE_S)
        assert target.commands == [WRITE, WRITE]
        assert bytes(target.memory[8192 : 8192 + (128 << 10)]) == bytes(memory.view()[: 128 << 10])


def test_answers_may_come_in_another_order() -> None:
    with NvmeTarget() as target, reached(target) as (engine, memory, place):
        target.memory[:] = pattern(3, len(target.memory)).tobytes()
        target.faults.hold = 4
        blocks = [[i * 4096, i * 8192, 4096] for i in range(64)]
        engine.read(memory, place, blocks).wait(DEADLINE_S)
        for local, remote, length in blocks:
            assert bytes(memory.view()[local : local + length]) == target.memory[remote : remote + length]


def test_more_commands_than_the_queues_hold_wait_for_their_turn() -> None:
    with (
        NvmeTarget() as target,
        reached(target, io_queues=1, queue_entries=4, in_flight=64) as (engine, memory, place),
    ):
        blocks = [[i * 512, i * 1024, 512] for i in range(1000)]
        engine.write(memory, place, blocks).wait(DEADLINE_S)
        assert len(target.commands) == 1000


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (0x280, TransferError, "write fault"),
        (0x286, RegionRefused, "access denied"),
        (0x302, PeerUnreachable, "no access"),
        (0x3FF, TransferError, "3/ff"),
    ],
)
def test_a_status_becomes_an_error_that_names_the_place(
    status: int, error: type[TransferError], words: str
) -> None:
    with NvmeTarget() as target, reached(target) as (engine, memory, place):
        target.faults.statuses[WRITE] = status
        with pytest.raises(error) as caught:
            engine.write(memory, place, [[0, 12_288, 4096]]).wait(DEADLINE_S)
        assert words in str(caught.value)
        assert "offset 12288" in str(caught.value)
        target.faults.statuses.clear()
        check_round_trip(engine, memory, place, target)


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_lost_connection_ends_what_was_under_way_and_is_made_anew(way: str) -> None:
    with NvmeTarget() as target, reached(target) as (engine, memory, place):
        check_round_trip(engine, memory, place, target)
        target.faults.drop_after = 3
        move = engine.read if way == "read" else engine.write
        with pytest.raises(PeerUnreachable, match="connection"):
            move(memory, place, [[0, 0, NBYTES]] * 20).wait(DEADLINE_S)
        check_after_loss(engine, memory, place, target)


def check_after_loss(engine: TransferEngine, memory: Region, place: RemoteRegion, target: NvmeTarget) -> None:
    """The engine avoids a rail that has failed for a moment; then everything works."""

    def works() -> bool:
        try:
            engine.read(memory, place, [[0, 0, 512]]).wait(DEADLINE_S)
        except PeerUnreachable:
            return False
        return True

    wait_until(works, "the target is reached again")
    check_round_trip(engine, memory, place, target)


def test_writes_wait_after_a_loss_until_nothing_earlier_can_land() -> None:
    fence_s = 0.7
    with NvmeTarget() as target, reached(target, fence_s=fence_s) as (engine, memory, place):
        check_round_trip(engine, memory, place, target)
        target.faults.mute = True
        transfer = engine.write(memory, place, [[0, 0, 65536]])
        wait_until(lambda: target.commands.count(WRITE) > 5, "a write is under way")
        target.drop_connections()
        lost = time.monotonic()
        target.faults.mute = False
        with pytest.raises(PeerUnreachable):
            transfer.wait(DEADLINE_S)
        while True:
            try:
                engine.write(memory, place, [[0, 0, 65536]]).wait(DEADLINE_S)
                break
            except PeerUnreachable:
                assert time.monotonic() - lost < DEADLINE_S
        assert time.monotonic() - lost >= fence_s * 0.9


@pytest.mark.parametrize("fault", ["spoil_data", "spoil_header"])
def test_a_wrong_digest_is_never_taken_for_data(fault: str) -> None:
    digests = {"header_digest": True, "data_digest": True}
    with NvmeTarget() as target, reached(target, 65536, **digests) as (engine, memory, place):
        target.memory[:] = pattern(3, len(target.memory)).tobytes()
        setattr(target.faults, fault, True)
        with pytest.raises(PeerUnreachable, match="digest"):
            engine.read(memory, place, [[0, 0, 4096]] * 4).wait(DEADLINE_S)
        check_after_loss(engine, memory, place, target)


def test_a_target_that_does_not_answer_is_given_up_in_time() -> None:
    with NvmeTarget() as target, reached(target, command_timeout_s=3.0) as (engine, memory, place):
        target.faults.mute = True
        began = time.monotonic()
        with pytest.raises(PeerUnreachable, match="command_timeout_s"):
            engine.read(memory, place, [[0, 0, 4096]]).wait(DEADLINE_S)
        assert 2.9 < time.monotonic() - began < 15
        target.faults.mute = False
        check_after_loss(engine, memory, place, target)


def test_a_target_that_answers_no_keep_alive_is_given_up() -> None:
    with NvmeTarget() as target, reached(target, keep_alive_s=3.0) as (engine, memory, place):
        check_round_trip(engine, memory, place, target)
        target.faults.deaf = target.faults.mute = True
        with pytest.raises(PeerUnreachable, match="Keep Alive"):
            engine.read(memory, place, [[0, 0, 4096]]).wait(DEADLINE_S)


def test_a_deadline_ends_a_transfer_and_its_memory_is_free_once_it_is_over() -> None:
    with NvmeTarget() as target, reached(target, command_timeout_s=1.0) as (engine, memory, place):
        target.faults.mute = True
        with pytest.raises(TransferTimeout):
            engine.read(memory, place, [[0, 0, 4096]]).wait(0.05)
        memory.close(DEADLINE_S)


GARBAGE = {
    "unknown type": struct.pack("<BBBBI16x", 0x55, 0, 24, 0, 24),
    "header too long": struct.pack("<BBBBI16x", 5, 0, 200, 0, 24),
    "answer to nothing": struct.pack("<BBBBIQHHHH", 5, 0, 24, 0, 24, 0, 0, 1, 999, 0),
    "data for nothing": struct.pack("<BBBBIHHII4x", 7, 4, 24, 24, 32, 999, 0, 0, 8),
    "data beyond": struct.pack("<BBBBIHHII4x", 7, 4, 24, 24, 24 + 8, 0, 0, 1 << 20, 8),
    "R2T for a read": struct.pack("<BBBBIHHII4x", 9, 0, 24, 0, 24, 0, 1, 0, 512),
    "terminates": struct.pack("<BBBBIHI10x", 3, 0, 24, 0, 24, 2, 0),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_target_that_breaks_the_protocol_is_cut_off(garbage: bytes) -> None:
    with NvmeTarget() as target, reached(target) as (engine, memory, place):
        check_round_trip(engine, memory, place, target)
        target.faults.raw = garbage
        target.faults.statuses[READ] = 0x280  # answered by respond(), which sends the garbage instead
        with pytest.raises(PeerUnreachable, match=r"protocol error|ended the connection"):
            engine.read(memory, place, [[0, 0, 4096]]).wait(DEADLINE_S)
        target.faults.statuses.clear()
        check_after_loss(engine, memory, place, target)


def test_wrong_places_are_named() -> None:
    with NvmeTarget() as target:
        with pytest.raises(RegionRefused, match="is there such a subsystem"):
            namespace(target.url.replace("double", "other"))
        with pytest.raises(RegionRefused, match="namespace 9"):
            namespace(target.url.replace("nsid=1", "nsid=9"))
        port = target.port
    with pytest.raises(PeerUnreachable, match=f"127.0.0.1:{port}"):
        namespace(target.url)
    for url in ("nvme-tcp://", "http://x/y", "nvme-tcp://h:0/n", "nvme-tcp://h/n?color=red", "nvme-tcp://h/"):
        with pytest.raises(ConfigError, match="names no namespace"):
            namespace(url)


def test_ranges_beyond_a_namespace_that_has_shrunk_are_refused() -> None:
    with NvmeTarget() as target, reached(target) as (engine, memory, place):
        del target.memory[NBYTES:]
        with pytest.raises(RegionRefused, match="beyond the end"):
            engine.read(memory, place, [[0, NBYTES, 4096]]).wait(DEADLINE_S)
