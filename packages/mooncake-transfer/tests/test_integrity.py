"""Checksums of both ends, and what is done about a difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_transfer import (
    FileSource,
    RailConfig,
    Region,
    RemoteRegion,
    Transfer,
    TransferEngine,
    _integrity,
    _wire,
)
from mooncake_transfer.errors import ConfigError, IntegrityError, TransferCancelled, TransferError
from mooncake_transfer.log_format import fields_of
from mooncake_transfer.peer import CHECKSUM_METHOD
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

MIB = 1 << 20
NBYTES = 5 * MIB
DEADLINE_S = 20.0


class Pair:
    """Two engines over a device that can spoil bytes."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self.fabric = stack.enter_context(FakeFabric())
        self.near = stack.enter_context(TransferEngine(self.fabric.config("near", **settings)))
        self.far = stack.enter_context(TransferEngine(self.fabric.config("far")))
        self.local: Region = self.near.allocate(NBYTES)
        self.owned: Region = self.far.allocate(NBYTES)
        self.remote: RemoteRegion = self.near.import_region(self.owned.descriptor())
        self.device = self.fabric.device("near")
        bytes_of(self.local)[:] = np.resize(np.arange(251, dtype=np.uint8), NBYTES)

    def write(self, **options: Any) -> Transfer:
        return self.near.write(self.local, self.remote, [[0, 0, NBYTES]], **options)

    def same(self) -> bool:
        return np.array_equal(bytes_of(self.local), bytes_of(self.owned))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_without_checking_a_spoilt_byte_goes_unnoticed(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.device.corrupt(next=1)
    pair.write().wait(DEADLINE_S)
    assert not pair.same()


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_spoilt_range_is_moved_again(stack: ExitStack, opcode: str) -> None:
    pair = Pair(stack, integrity="full")
    if opcode == "read":
        bytes_of(pair.owned)[:] = bytes_of(pair.local)
        bytes_of(pair.local)[:] = 0
    pair.device.corrupt(next=1)
    transfer = getattr(pair.near, opcode)(pair.local, pair.remote, [[0, 0, NBYTES]])
    transfer.wait(DEADLINE_S)
    assert pair.same()
    counters = pair.device.counters()
    assert counters.corrupted == 1
    assert counters.bytes_written + counters.bytes_read <= NBYTES + MIB  # only the range that differed again


def test_what_stays_spoilt_is_an_error_that_names_the_place(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.device.corrupt(rate=1.0)
    with pytest.raises(IntegrityError, match=r"write to region .*differ.*local offset \d+.*fake0"):
        pair.write(verify=True).wait(DEADLINE_S)


def test_the_transfer_is_not_done_and_nobody_is_told_before_the_bytes_agree(stack: ExitStack) -> None:
    pair = Pair(stack, integrity="full")
    seen: list[bool] = []
    pair.far.serve("moved", lambda payload, caller: seen.append(pair.same()))
    pair.device.corrupt(next=1)
    transfer = pair.write(notify=("moved", b""))
    transfer.wait(DEADLINE_S)
    wait_until(lambda: bool(seen), "the notification arrives")
    assert seen == [True]


def test_a_sample_finds_what_is_spoilt_everywhere(stack: ExitStack) -> None:
    pair = Pair(stack, integrity="sample", integrity_sample=0.1)
    pair.device.corrupt(rate=1.0)
    rows = [[i * 8192, i * 8192, 4096] for i in range(100)]
    with pytest.raises(IntegrityError):
        pair.near.write(pair.local, pair.remote, rows).wait(DEADLINE_S)


def compared(pair: Pair) -> list[tuple[int, int]]:
    """The ranges whose checksums the far end is asked for from now on."""
    asked: list[tuple[int, int]] = []
    answer = pair.far._dispatcher._handlers[CHECKSUM_METHOD]

    def note_and_answer(body: bytes, caller: Any) -> bytes | None:
        asked.extend(msgspec.msgpack.decode(body, type=_wire.ChecksumQuery).ranges)
        return answer(body, caller)

    pair.far._dispatcher._handlers[CHECKSUM_METHOD] = note_and_answer
    return asked


def test_a_sample_of_a_long_block_is_a_share_of_its_ranges(stack: ExitStack) -> None:
    pair = Pair(stack, integrity="sample", integrity_sample=0.4)
    asked = compared(pair)
    pair.write().wait(DEADLINE_S)  # 5 ranges of 1 MiB
    assert len(set(asked)) == len(asked) == 2
    assert {offset % MIB for offset, _ in asked} == {0}
    assert {nbytes for _, nbytes in asked} == {MIB}


def test_a_sample_is_that_share_of_transfers_of_one_block_too(stack: ExitStack) -> None:
    pair = Pair(stack, integrity="sample", integrity_sample=0.25)
    asked = compared(pair)
    for i in range(256):
        pair.near.write(pair.local, pair.remote, [[i * 4096, i * 4096, 4096]]).wait(DEADLINE_S)
    assert 0 < len(asked) < 160  # 64 on average; chance alone is not as far off once in 10 to the 30


def test_one_transfer_can_do_without(stack: ExitStack) -> None:
    pair = Pair(stack, integrity="full")
    pair.device.corrupt(next=1)
    pair.write(verify=False).wait(DEADLINE_S)
    assert not pair.same()


def test_a_share_that_is_none_is_refused(stack: ExitStack) -> None:
    with pytest.raises(ConfigError, match="integrity_sample"):
        Pair(stack, integrity="sample", integrity_sample=0.0)


def test_many_transfers_at_once_are_checked(stack: ExitStack) -> None:
    pair = Pair(stack, integrity="full")
    pair.device.corrupt(rate=0.05)
    transfers = [pair.near.write(pair.local, pair.remote, [[i * 65536, i * 65536, 65536]]) for i in range(80)]
    for transfer in transfers:
        transfer.wait(DEADLINE_S)
    assert pair.same()


def test_a_checked_transfer_that_fails_or_is_cancelled_ends(stack: ExitStack) -> None:
    pair = Pair(stack, integrity="full", rails=RailConfig(attempts=1))
    pair.device.fail(next=1)
    with pytest.raises(TransferError, match="fake"):
        pair.write().wait(DEADLINE_S)
    pair.device.freeze()
    transfer = pair.write()
    transfer.cancel()
    pair.device.thaw()
    with pytest.raises(TransferCancelled):
        transfer.wait(DEADLINE_S)
    pair.write().wait(DEADLINE_S)
    assert pair.same()


def test_an_error_while_comparing_leaves_a_line_that_names_its_peer(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    pair = Pair(stack)
    monkeypatch.setattr(_integrity, "_fetch", fail)
    with pytest.raises(IntegrityError, match="an error of this engine"):
        pair.write(verify=True).wait(DEADLINE_S)

    def of_the_peer() -> list[dict[str, str]]:
        return [fields_of(record) for record in caplog.records if "comparing" in record.getMessage()]

    wait_until(lambda: bool(of_the_peer()), "the error is logged")
    assert of_the_peer() == [{"peer": pair.remote.peer.address}]


class OfFile:
    """Main memory of one engine and a file of another one, over a device that takes both."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        path.write_bytes(b"f" * 4096)
        self.path = path
        fabric = stack.enter_context(FakeFabric())
        options = {"kinds": "dram,file"}
        self.near = stack.enter_context(
            TransferEngine(fabric.config("near", options=options, integrity="full"))
        )
        self.far = stack.enter_context(TransferEngine(fabric.config("far", options=options)))

    def register(self, engine: TransferEngine) -> Region:
        return engine.register(FileSource(self.path, writable=True), name="blocks")


@pytest.mark.parametrize("end", ["local", "remote"])
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_file_at_either_end_is_not_verified_and_says_so_before_anything_moves(
    stack: ExitStack, tmp_path: Path, opcode: str, end: str
) -> None:
    case = OfFile(stack, tmp_path / "blocks")
    if end == "local":
        local, owned = case.register(case.near), case.far.allocate(4096)
        memory = owned
    else:
        local, owned = case.near.allocate(4096), case.register(case.far)
        memory = local
    move = getattr(case.near, opcode)
    remote = case.near.import_region(owned.descriptor())
    assert remote.kind is owned.kind
    with pytest.raises(ConfigError, match=rf"cannot be verified: {end} region 'blocks' is of kind FILE"):
        move(local, remote, [[0, 0, 4096]])
    assert (case.path.read_bytes(), bytes(memory.view())) == (b"f" * 4096, bytes(4096))
    move(local, remote, [[0, 0, 4096]], verify=False).wait(DEADLINE_S)
    assert case.path.read_bytes() == bytes(memory.view())


@pytest.mark.parametrize("fields", [{"access": "rw"}, {"access": "rw", "kind": "HOLOGRAM"}])
def test_a_descriptor_that_tells_no_known_kind_is_used_and_a_file_of_it_told_afterwards(
    stack: ExitStack, tmp_path: Path, fields: dict[str, str]
) -> None:
    """As engines made them before there was the field, and as later ones may."""
    case = OfFile(stack, tmp_path / "blocks")

    def imported(region: Region) -> RemoteRegion:
        whole = msgspec.msgpack.decode(region.descriptor())
        before = len(whole) - 2  # access and kind are the last two
        return case.near.import_region(msgspec.msgpack.encode([*whole[:before], *fields.values()]))

    local, memory, file = case.near.allocate(4096), imported(case.far.allocate(4096)), case.register(case.far)
    assert memory.kind is None
    case.near.write(local, memory, [[0, 0, 4096]]).wait(DEADLINE_S)
    with pytest.raises(IntegrityError, match=r"'blocks' is of kind FILE, which has no checksum"):
        case.near.write(local, imported(file), [[0, 0, 4096]]).wait(DEADLINE_S)
