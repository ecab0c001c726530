"""Pools: what is kept, what is given back, what a killed process leaves, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_driver_cxl import Block, BlockInfo, Pool
from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import ConfigError, DriverUnavailable, MemoryUnavailable

log = logging.getLogger(__name__)

MIB = 1 << 20
MFD_HUGETLB, MFD_HUGE_2MB = 4, 21 << 26  # <linux/memfd.h>
POOL_BYTES = 64 * MIB
DEADLINE_S = 30.0
# Places in the pool, as core/layout.hpp has them: the header, then one host's tables.
PAGE = 4096
BLOCK_TABLE = PAGE + 128 * 192 + 128 * 64 * 64 + 128 * 1024 * 128
BLOCK_BYTES = 128


def make(path: Path, **options: object) -> Pool:
    return Pool.open(str(path), create=True, size_bytes=POOL_BYTES, **options)


def bytes_of(block: Block) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    found = block.range
    return np.frombuffer((ctypes.c_ubyte * found.nbytes).from_address(found.address), np.uint8)


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_kept_block_is_found_again_with_its_bytes(pool_path: Path) -> None:
    pool = make(pool_path)
    block = pool.allocate(MIB, name="kv", keep=True)
    bytes_of(block)[:] = 7
    del block, pool
    gc.collect()
    pool = Pool.open(str(pool_path))
    assert pool.blocks() == [BlockInfo("kv", MIB, kept=True, owned=False)]
    assert set(bytes_of(pool.reopen("kv")).tolist()) == {7}


def test_a_block_that_is_not_kept_goes_with_its_last_reference_and_comes_back_zeroed(pool_path: Path) -> None:
    pool = make(pool_path)
    free = pool.free_bytes
    block = pool.allocate(MIB)
    bytes_of(block)[:] = 7
    assert pool.free_bytes == free - MIB
    offset = block.offset
    del block
    gc.collect()
    assert pool.free_bytes == free
    again = pool.allocate(MIB)
    assert (again.offset, bytes_of(again).any()) == (offset, False)


def test_a_view_of_a_region_keeps_the_block(pool_path: Path) -> None:
    pool = make(pool_path)
    free = pool.free_bytes
    with TransferEngine() as engine:
        region = engine.register(pool.allocate(MIB).range)
        view = region.view()
        region.close()
    assert pool.free_bytes == free - MIB
    view[0] = 1
    del view, region
    gc.collect()
    assert pool.free_bytes == free


CRASH = """
import os, sys
from mooncake_driver_cxl import Pool
pool = Pool.open(sys.argv[1])
kept, lost = pool.allocate(4096, name="kept", keep=True), pool.allocate(1 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_had_is_given_back_and_what_it_kept_stays(pool_path: Path) -> None:
    pool = make(pool_path)
    free = pool.free_bytes
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH, str(pool_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    assert [info.owned for info in pool.blocks()] == [True, True]
    with pytest.raises(ConfigError, match=f"has an owner that lives, process {child.pid}"):
        pool.reopen("kept")
    child.kill()
    child.wait(DEADLINE_S)
    child.stdout.close()
    child.stdin.close()
    assert pool.blocks() == [BlockInfo("kept", 4096, kept=True, owned=False)]
    assert pool.free_bytes == free - 4096
    pool.drop("kept")
    assert pool.free_bytes == free


CHURN = """
import random, sys
from mooncake_driver_cxl import Pool
pool, held = Pool.open(sys.argv[1]), []
print("ready", flush=True)
for turn in range(1 << 60):
    held.append(pool.allocate(random.randrange(1, 200_000), name=f"{sys.argv[2]}-{turn}", keep=turn % 2 == 0))
    if len(held) > 20:
        held.pop(random.randrange(20))
        for info in pool.blocks():
            if info.kept and not info.owned:
                try:
                    pool.drop(info.name)
                except ValueError:
                    pass
"""


def test_processes_killed_at_any_moment_leave_a_sound_table(pool_path: Path) -> None:
    seed = random.randrange(1 << 30)
    log.info("seed %d", seed)
    chance = random.Random(seed)
    pool = make(pool_path)
    free = pool.free_bytes
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHURN, str(pool_path), str(number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(6)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        moment = time.monotonic() + chance.random() * 0.1
        while time.monotonic() < moment:
            pool.blocks()  # competes for the lock; raises when it meets a damaged table
        child.send_signal(signal.SIGKILL)
    for child in children:
        child.communicate(timeout=DEADLINE_S)
    for info in pool.blocks():
        assert info.kept
        assert not info.owned
        pool.drop(info.name)
    assert pool.free_bytes == free


def test_a_damaged_table_is_found_and_named(pool_path: Path) -> None:
    pool = make(pool_path)
    block = pool.allocate(MIB, name="kv", keep=True)
    with pool_path.open("r+b") as file:
        file.seek(BLOCK_TABLE + 24)  # the length of the first block
        file.write(struct.pack("<Q", 2 * MIB))
    with pytest.raises(DriverUnavailable, match=r"block 0 in the table of the pool .* is damaged"):
        pool.blocks()
    with pytest.raises(DriverUnavailable, match="is damaged"):
        pool.allocate(MIB)
    del block


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"notapool", "holds no pool"),
        (8, struct.pack("<I", 2), "version 2, and this driver knows 1"),
        (16, b"\xff", "header is damaged"),
        (32, struct.pack("<Q", 1 << 40), "header is damaged"),
    ],
)
def test_a_header_that_is_not_sound_is_refused(
    pool_path: Path, place: int, value: bytes, message: str
) -> None:
    make(pool_path)
    gc.collect()
    with pool_path.open("r+b") as file:
        file.seek(place)
        file.write(value)
    with pytest.raises((ConfigError, DriverUnavailable), match=message):
        Pool.open(str(pool_path))


def test_a_file_that_was_cut_short_is_refused(pool_path: Path) -> None:
    make(pool_path)
    gc.collect()
    os.truncate(pool_path, POOL_BYTES // 2)
    with pytest.raises(ConfigError, match="was made for 67108864 bytes, of which 33554432"):
        Pool.open(str(pool_path))


def test_only_empty_files_become_pools_unless_overwriting_is_asked_for(pool_path: Path) -> None:
    pool_path.write_bytes(b"letters" + bytes(POOL_BYTES))
    with pytest.raises(ConfigError, match="holds no pool"):
        make(pool_path)
    with pytest.raises(ConfigError, match="is not empty"):
        Pool.format(str(pool_path))
    Pool.format(str(pool_path), overwrite=True)
    assert Pool.open(str(pool_path)).free_bytes > 0


def test_requests_that_cannot_be_met_say_why(pool_path: Path) -> None:
    pool = make(pool_path)
    with pytest.raises(MemoryUnavailable, match="has no piece of 67104768 bytes left for host 0"):
        pool.allocate(POOL_BYTES - 4096)
    with pytest.raises(ConfigError, match="must be positive"):
        pool.allocate(0)
    with pytest.raises(ConfigError, match="needs a name of 1 to 63 bytes"):
        pool.allocate(1, keep=True)
    block = pool.allocate(1, name="kv", keep=True)
    with pytest.raises(ConfigError, match="has a block named 'kv'"):
        pool.allocate(1, name="kv", keep=True)
    with pytest.raises(ConfigError, match="no block named 'other'"):
        pool.reopen("other")
    with pytest.raises(ConfigError, match="outside the block"):
        block.flush(1, 1 << 40)
    with pytest.raises(ConfigError, match="host is 1, but the pool is for 1 hosts"):
        Pool.open(str(pool_path), host=1)
    with pytest.raises(DriverUnavailable, match="No such file"):
        Pool.open(str(pool_path) + "-other")
    with pytest.raises(ConfigError, match="is no dax device"):
        Pool.open("/dev/null")
    with pytest.raises(ConfigError, match=r"a pool for 1 hosts needs \d+"):
        Pool.open(str(pool_path) + "-small", create=True, size_bytes=MIB)
    Path(str(pool_path) + "-small").unlink()


@pytest.fixture
def huge_path() -> Iterator[str]:
    """An empty file on the kernel's own mount of hugetlbfs, which needs no pages yet."""
    try:
        fd = os.memfd_create("pool", MFD_HUGETLB | MFD_HUGE_2MB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages of 2 MiB: {error}")
    yield f"/proc/self/fd/{fd}"
    os.close(fd)


def test_a_pool_on_hugetlbfs_is_whole_huge_pages(huge_path: str) -> None:
    with pytest.raises(ConfigError, match="size_bytes, 67112960, is no multiple of its page, 2097152"):
        Pool.open(huge_path, create=True, size_bytes=POOL_BYTES + 4096)


def test_huge_pages_that_are_missing_are_counted_with_the_remedy(huge_path: str) -> None:
    with pytest.raises(
        MemoryUnavailable,
        match=r"1048576 huge pages of which \d+ are free; write more to /sys/.*-2048kB/nr_hug",
    ):
        Pool.open(huge_path, create=True, size_bytes=1 << 41)


def test_each_host_allocates_in_its_own_share(pool_path: Path) -> None:
    first = make(pool_path, hosts=2, host=0)
    second = Pool.open(str(pool_path), host=1)
    assert first.uuid == second.uuid
    mine, theirs = first.allocate(MIB), second.allocate(MIB)
    assert theirs.offset >= mine.offset + first.free_bytes
    assert [len(pool.blocks()) for pool in (first, second)] == [1, 1]


def test_a_host_number_that_another_machine_uses_is_refused_until_it_falls_silent(pool_path: Path) -> None:
    pool = make(pool_path, lease_s=3.0)
    with pool_path.open("r+b") as file:  # as if the member had been written by another boot of Linux
        file.seek(PAGE + 8)
        file.write(bytes(16))
    other = "import sys; from mooncake_driver_cxl import Pool; Pool.open(sys.argv[1], lease_s=3.0)"
    refused = run(other, pool_path)
    assert "another machine uses the pool" in refused.stderr, refused.stderr
    del pool
    gc.collect()
    assert run(other, pool_path).returncode == 0


def test_a_forked_child_leaves_the_pool_alone(pool_path: Path) -> None:
    pool = make(pool_path)
    block = pool.allocate(MIB, name="kv")
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child, and fails the test, where it hangs
        del block, pool
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [info.owned for info in pool.blocks()] == [True]
    assert block.nbytes == MIB
