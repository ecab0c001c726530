"""Many regions at once: in order, in parallel, all of them or none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from mooncake_transfer import MemoryRange, Region, TransferEngine
from mooncake_transfer.errors import ConfigError, EngineClosed, RegionOverlap
from mooncake_transfer.introspection import take_snapshot
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of

DEADLINE_S = 10.0
NBYTES = 4096
COUNT = 16
REGISTER_MS = 50


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with FakeFabric() as fabric:
        yield fabric


@pytest.fixture
def engine(fabric: FakeFabric) -> Iterator[TransferEngine]:
    with TransferEngine(fabric.config("near")) as engine:
        yield engine


def memories(count: int) -> list[bytearray]:
    return [bytearray([number]) * NBYTES for number in range(count)]


def test_regions_come_in_the_order_of_their_memories_with_the_names_given(engine: TransferEngine) -> None:
    names = [f"layer-{number}" for number in range(COUNT)]
    regions = engine.register_many(memories(COUNT), names=names)
    assert [region.name for region in regions] == names
    assert [int(bytes_of(region)[0]) for region in regions] == list(range(COUNT))
    assert {region.nbytes for region in regions} == {NBYTES}


def test_regions_without_names_get_different_ones_and_none_is_no_error(engine: TransferEngine) -> None:
    assert engine.register_many([]) == []
    assert len({region.name for region in engine.register_many(memories(COUNT))}) == COUNT


def test_each_region_can_be_reached_by_a_peer(engine: TransferEngine, fabric: FakeFabric) -> None:
    with TransferEngine(fabric.config("far")) as far:
        local = far.allocate(NBYTES)
        for number, region in enumerate(engine.register_many(memories(COUNT))):
            far.read(local, far.import_region(region.descriptor()), [[0, 0, NBYTES]]).wait(DEADLINE_S)
            assert bytes(local.view()) == bytes([number]) * NBYTES


def test_registering_many_takes_much_less_time_than_one_after_another(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)  # so many at once; registering here only takes time
    with TransferEngine(fabric.config("slow", options={"register_ms": REGISTER_MS})) as engine:
        began = time.monotonic()
        engine.register(bytearray(NBYTES))
        one_s = time.monotonic() - began
        began = time.monotonic()
        engine.register_many(memories(COUNT))
        all_s = time.monotonic() - began
    assert one_s >= REGISTER_MS / 1e3
    # Two rounds of eight. A quarter of what they take one by one leaves room for a busy machine.
    assert 2 * REGISTER_MS / 1e3 <= all_s < COUNT * REGISTER_MS / 1e3 / 2


@pytest.mark.parametrize("bad", [0, 7, COUNT - 1])
def test_one_that_cannot_be_registered_undoes_all_and_its_error_is_raised(
    engine: TransferEngine, bad: int
) -> None:
    several: list[object] = [*memories(COUNT)]
    several[bad] = b"read-only"
    with pytest.raises(ConfigError, match="it is read-only"):
        engine.register_many(several)
    assert take_snapshot(engine).regions == 0
    several[bad] = bytearray(NBYTES)
    regions = engine.register_many(several)
    assert take_snapshot(engine).regions == len(regions) == COUNT


def test_ctrl_c_undoes_all(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real, interrupting = engine.register, 3

    def register(memory: object, *, name: str) -> Region:
        region = real(memory, name=name)
        if name == names[interrupting]:
            os.kill(os.getpid(), signal.SIGINT)  # for the main thread, which waits for this one
        return region

    names = [f"layer-{number}" for number in range(COUNT)]
    monkeypatch.setattr(engine, "register", register)
    with pytest.raises(KeyboardInterrupt):
        engine.register_many(memories(COUNT), names=names)
    assert take_snapshot(engine).regions == 0


def test_ranges_that_overlap_in_part_are_refused_together(engine: TransferEngine) -> None:
    memory = bytearray(4 * NBYTES)
    whole = engine.register(memory)
    start = whole.address
    whole.close()
    halves = [MemoryRange(start, 2 * NBYTES, memory), MemoryRange(start + NBYTES, 2 * NBYTES, memory)]
    with pytest.raises(RegionOverlap):
        engine.register_many(halves)
    with engine.register(memory), engine.register(halves[1]):
        pass


def test_names_that_are_not_as_many_as_memories_are_refused_with_both_numbers(
    engine: TransferEngine,
) -> None:
    with pytest.raises(ConfigError, match="2 names for 3 memories"):
        engine.register_many(memories(3), names=["a", "b"])


def test_a_closed_engine_registers_none(engine: TransferEngine) -> None:
    engine.close()
    with pytest.raises(EngineClosed):
        engine.register_many(memories(2))
