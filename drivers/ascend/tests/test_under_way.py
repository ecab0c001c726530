"""What was begun is over for the engine only when nothing can land any more, whatever HIXL and the NPU do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cann import installed
from npu_memory import NpuMemory, control, count, huge, land, pinned, violation

from mooncake_transfer import Region, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import RegionBusy
from mooncake_transfer.testing import PeerProcess, digest, pattern
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

NBYTES = 1 << 20
ALL = [[0, 0, NBYTES]]
APART = [[at * 8192, at * 8192, 4096] for at in range(8)]
DEADLINE_S = 20.0
NOT_YET_S = 0.3
FOR_EVER = 1 << 30
KIND = "npu_memory:huge"


def config(**options: Any) -> TransferConfig:
    return TransferConfig(drivers=("ascend",), driver_options={"ascend": options})


@pytest.fixture(scope="module")
def library() -> Iterator[str]:
    """The double of the ACL runtime, beside that of HIXL."""
    with installed() as cann:
        yield str(cann / "lib64" / "libascendcl.so")


@pytest.fixture
def engine(library: str) -> Iterator[TransferEngine]:
    """An engine that takes a transfer for lost soon."""
    quick = {"transfer_timeout_s": 0.1, "answer_timeout_s": 0.5}
    with TransferEngine(config(library=library, **quick)) as engine:
        yield engine
    assert violation() == ""


def memory_of(engine: TransferEngine, seed: int) -> tuple[Region, NpuMemory]:
    memory = huge(NBYTES)
    memory.set(pattern(seed, NBYTES))
    return engine.register(memory.source), memory


def errors(engine: TransferEngine) -> int:
    return sum(counted["errors"] for counted in engine.stats().values())


def stays_under_way(engine: TransferEngine, transfer: Transfer) -> None:
    """Look for a while: no operation ends, not even with an error, after which it would be tried again."""
    until = time.monotonic() + NOT_YET_S
    while time.monotonic() < until:
        assert not transfer.done()
        assert errors(engine) == 0
        time.sleep(0.005)


@pytest.mark.parametrize("failing", ["hold transfers", "fail transfer"])
def test_a_transfer_is_over_only_when_hixl_has_ended_its_link(
    engine: TransferEngine, library: str, failing: str
) -> None:
    local, memory = memory_of(engine, 1)
    with PeerProcess(config(library=library), kind=KIND) as peer:
        owned = peer.allocate(NBYTES, 2)
        remote = engine.import_region(owned.descriptor)
        engine.read(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)
        memory.set(pattern(1, NBYTES))
        with control("fail disconnect", FOR_EVER):
            with control(failing, 1):
                transfer = engine.write(local, remote, ALL)
                stays_under_way(engine, transfer)
            assert land() > 0, "the double has nothing that could land late"
            stays_under_way(engine, transfer)
        wait_until(lambda: errors(engine) > 0, "the operation ends")
        transfer.wait(DEADLINE_S)  # the engine tries again
        assert land() == 0
        assert peer.digest(owned.number) == digest(pattern(1, NBYTES))


def test_a_link_that_never_ends_does_so_with_the_engine(library: str) -> None:
    with PeerProcess(config(library=library), kind=KIND) as peer:
        owned = peer.allocate(NBYTES, 2)
        with control("fail disconnect", FOR_EVER):
            with TransferEngine(config(library=library, transfer_timeout_s=0.1)) as engine:
                local, _ = memory_of(engine, 1)
                with control("hold transfers", 1):
                    transfer = engine.write(local, engine.import_region(owned.descriptor), ALL)
                    stays_under_way(engine, transfer)
            assert land() == 0
        assert peer.digest(owned.number) == digest(pattern(2, NBYTES))
    assert violation() == ""


def test_memory_is_given_back_only_when_every_link_has_ended(engine: TransferEngine, library: str) -> None:
    local, _ = memory_of(engine, 1)
    with PeerProcess(config(library=library), kind=KIND) as peer:
        remote = engine.import_region(peer.allocate(NBYTES, 2).descriptor)
        engine.read(local, remote, ALL).wait(DEADLINE_S)
        with control("fail disconnect", FOR_EVER):
            for _ in range(2):
                with pytest.raises(RegionBusy, match="HIXL has not let go of the memory"):
                    local.close(NOT_YET_S)
        local.close(DEADLINE_S)


def test_closing_a_region_keeps_its_deadline_while_a_transfer_is_slow(library: str) -> None:
    with (
        TransferEngine(config(library=library)) as engine,
        PeerProcess(config(library=library), kind=KIND) as peer,
    ):
        local, _ = memory_of(engine, 1)
        other, _ = memory_of(engine, 2)
        remote = engine.import_region(peer.allocate(NBYTES, 3).descriptor)
        engine.read(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)
        with control("hold transfers", 1):
            before = count("hccs")
            transfer = engine.read(local, remote, ALL)
            wait_until(lambda: count("hccs") > before, "HIXL has begun it")
            began = time.monotonic()
            with pytest.raises(RegionBusy):
                other.close(NOT_YET_S)
            assert time.monotonic() - began < 10 * NOT_YET_S  # transfer_timeout_s is 10 s
        transfer.wait(DEADLINE_S)
        other.close(DEADLINE_S)
    assert violation() == ""


@pytest.mark.parametrize("failing", ["", "fail copy"])
def test_copies_within_the_process_are_over_when_the_npu_has_ended_them(
    engine: TransferEngine, library: str, failing: str
) -> None:
    local, memory = memory_of(engine, 1)
    on_host = engine.allocate(NBYTES)
    bytes_of(on_host)[:] = pattern(4, NBYTES)
    with TransferEngine(config(library=library)) as owner:
        region, there = memory_of(owner, 2)
        remote = engine.import_region(region.descriptor())
        engine.write(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)  # granted: blocks go together from now on
        with control("hold streams", 1):
            with control(failing or "none", 5):
                transfer = engine.write(local, remote, APART)
                stays_under_way(engine, transfer)
            # Nobody else waits for the NPU.
            main = owner.allocate(NBYTES)
            engine.write(on_host, engine.import_region(main.descriptor()), ALL).wait(DEADLINE_S)
            assert digest(bytes_of(main)) == digest(pattern(4, NBYTES))
        transfer.wait(DEADLINE_S)
        assert (errors(engine) > 0) == bool(failing)
        for at, _, length in APART:
            assert np.array_equal(there.get()[at : at + length], memory.get()[at : at + length])
        region.close(DEADLINE_S)


def test_blocks_of_pinned_main_memory_go_as_one_batch_in_a_stream(
    engine: TransferEngine, library: str
) -> None:
    memory = pinned(NBYTES)
    memory.set(pattern(1, NBYTES))
    local = engine.register(memory.source)
    with TransferEngine(config(library=library)) as owner:
        region, there = memory_of(owner, 2)
        remote = engine.import_region(region.descriptor())
        engine.write(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)  # granted: blocks go together from now on
        before = count("batches in streams")
        engine.write(local, remote, APART).wait(DEADLINE_S)
        assert count("batches in streams") > before
        for at, _, length in APART:
            assert np.array_equal(there.get()[at : at + length], memory.get()[at : at + length])


@pytest.mark.parametrize(
    ("path", "kind", "ways"),
    [
        ("rdma", KIND, {"rdma"}),
        ("rdma", "npu_memory:pinned", {"rdma"}),
        ("rdma", "engine", {"pool"}),
        ("hccs", KIND, {"hccs"}),
        ("hccs", "npu_memory:pinned", {"pool"}),
        ("auto", "npu_memory:pinned", {"pool"}),
    ],
)
def test_each_kind_of_memory_goes_the_way_that_its_path_has(
    library: str, path: str, kind: str, ways: set[str]
) -> None:
    """HCCS takes device memory alone directly; RDMA also main memory of aclrtMallocHost."""
    chosen = config(library=library, path=path)
    before = {way: count(way) for way in ("hccs", "rdma", "pool")}
    with TransferEngine(chosen) as engine, PeerProcess(chosen) as peer:
        memory = pinned(NBYTES) if kind != KIND else huge(NBYTES)
        memory.set(pattern(1, NBYTES))
        local = engine.register(memory.source)
        owned = peer.allocate(NBYTES, 2, kind)
        engine.write(local, engine.import_region(owned.descriptor), ALL).wait(DEADLINE_S)
        assert peer.digest(owned.number) == digest(pattern(1, NBYTES))
        assert {way for way, number in before.items() if count(way) > number} == ways
        peer.close_region(owned.number, DEADLINE_S)
        local.close(DEADLINE_S)
    assert violation() == ""


def test_main_memory_beyond_what_hixl_registers_goes_through_its_buffers(library: str) -> None:
    """A region around another one: HIXL takes no byte twice."""
    chosen = config(library=library, path="rdma")
    with TransferEngine(chosen) as engine, PeerProcess(chosen) as peer:
        memory = pinned(2 * NBYTES)
        first = engine.register(memory.whole()[NBYTES:])
        second = engine.register(memory.source)
        owned = peer.allocate(NBYTES, 1, "npu_memory:pinned")
        remote = engine.import_region(owned.descriptor)
        before = count("rdma"), count("pool")
        engine.read(first, remote, ALL).wait(DEADLINE_S)
        engine.read(second, remote, ALL).wait(DEADLINE_S)
        assert (count("rdma"), count("pool")) == (before[0] + 1, before[1] + 1)
        for half in (memory.whole()[:NBYTES], memory.whole()[NBYTES:]):
            assert digest(half) == digest(pattern(1, NBYTES))
        first.close()
        second.close()
    assert violation() == ""
