"""Which registered ranges may overlap, against a plain list as the model."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_transfer.errors import RegionOverlap
from mooncake_transfer.memory import FileSource, Memory, MemoryKind, RegionMap, file_source


def memory(begin: int, end: int) -> Memory:
    return Memory(begin, end - begin, None)


def test_equal_and_nested_ranges_are_regions_of_their_own() -> None:
    regions = RegionMap()
    regions.add(1, memory(1000, 2000), "cache")
    regions.add(2, memory(1000, 2000), "cache again")
    regions.add(3, memory(1200, 1300), "layer")
    regions.add(4, memory(500, 2500), "around")
    assert regions.find(1250, 10) == [3, 2, 1, 4]
    assert regions.find(1295, 10) == [2, 1, 4]
    regions.remove(1)
    regions.remove(2)
    assert regions.find(1250, 10) == [3, 4]
    regions.remove(4)
    assert regions.find(1250, 10) == [3]
    assert len(regions) == 1


def test_an_overlap_in_part_is_refused_and_named() -> None:
    regions = RegionMap()
    regions.add(1, memory(0x1000, 0x2000), "cache")
    for begin, end in ((0xFFF, 0x1001), (0x1FFF, 0x2001)):
        with pytest.raises(RegionOverlap, match=rf"'late'.*{begin:#x}.*'cache'.*4096 bytes at 0x1000"):
            regions.add(2, memory(begin, end), "late")
    regions.add(2, memory(0x2000, 0x2001), "beside")
    regions.remove(1)
    regions.add(1, memory(0x1FFF, 0x2001), "around")
    regions.remove(77)
    assert len(regions) == 2


def test_addresses_of_a_file_and_of_memory_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    regions = RegionMap()
    regions.add(1, memory(10, 110), "memory")
    parts = [file_source(FileSource(path, *part)) for part in ((60, 100), (60, 100), (100, 100))]
    other = Memory(0, 100, None, os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR), 100, MemoryKind.FILE)
    try:
        regions.add(2, parts[0], "part")
        regions.add(3, parts[1], "the same by another descriptor")
        with pytest.raises(RegionOverlap):
            regions.add(4, parts[2], "half of it")
        regions.add(5, other, "in another file")
    finally:
        for part in (*parts, other):
            part.close()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 20)), max_size=60),
    st.integers(0, 60),
    st.integers(1, 5),
)
def test_it_does_what_a_plain_list_does(
    steps: list[tuple[bool, int, int]], address: int, nbytes: int
) -> None:
    regions, model = RegionMap(), dict[int, tuple[int, int]]()
    for number, (adds, begin, length) in enumerate(steps):
        if not adds:
            victim = sorted(model)[begin % len(model)] if model else 0
            regions.remove(victim)
            model.pop(victim, None)
            continue
        end = begin + length
        crossing = any(
            begin < other_end and other_begin < end and not _nested(begin, end, other_begin, other_end)
            for other_begin, other_end in model.values()
        )
        try:
            regions.add(number, memory(begin, end), str(number))
        except RegionOverlap:
            assert crossing
        else:
            assert not crossing
            model[number] = (begin, end)
    holding = [
        (end - begin, -number)
        for number, (begin, end) in model.items()
        if begin <= address and address + nbytes <= end
    ]
    assert regions.find(address, nbytes) == [-number for _, number in sorted(holding)]
    assert len(regions) == len(model)


def _nested(begin: int, end: int, other_begin: int, other_end: int) -> bool:
    return (other_begin <= begin and end <= other_end) or (begin <= other_begin and other_end <= end)


def test_a_hundred_thousand_regions_stay_cheap() -> None:
    regions, count = RegionMap(), 100_000
    started = time.process_time()
    for index in range(count):  # far from sorted, yet each once
        begin = (index * 7919 % count) * 4096
        regions.add(index, memory(begin, begin + 4096), "layer")
    regions.add(count, memory(0, count * 4096), "whole")
    for index in range(0, count, 2):
        regions.remove(index)
    spent_s = time.process_time() - started
    assert regions.find(0) == [count]
    assert len(regions) == count // 2 + 1
    # A scan of all ranges for each would take minutes.
    assert spent_s < 20, f"{spent_s:.1f} s"
