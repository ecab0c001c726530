"""Files as regions: alignment, errors, durability, and machines that forbid io_uring."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mooncake_transfer import RailConfig, Region, RemoteRegion, TransferConfig, TransferEngine
from mooncake_transfer.errors import DriverUnavailable, RegionRefused, TransferError
from mooncake_transfer.memory import FileSource
from mooncake_transfer.testing import pattern
from mooncake_transfer.testing.fixtures import bytes_of

DEADLINE_S = 20.0
KIB, MIB = 1 << 10, 1 << 20
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h

each_way = pytest.mark.parametrize("io", ["io_uring", "threads"])


def config(**options: Any) -> TransferConfig:
    """The nvmeof driver alone, which gets one try."""
    return TransferConfig(
        drivers=("nvmeof",), driver_options={"nvmeof": options}, rails=RailConfig(attempts=1)
    )


@contextlib.contextmanager
def opened(
    path: Path, nbytes: int, offset: int = 0, **options: Any
) -> Iterator[tuple[TransferEngine, Region, RemoteRegion]]:
    """An engine, memory of it filled with a pattern, and a part of a file as a region."""
    with TransferEngine(config(**options)) as engine:
        memory = engine.allocate(nbytes)
        bytes_of(memory)[:] = pattern(1, nbytes)
        region = engine.register(FileSource(path, offset, nbytes))
        yield engine, memory, engine.import_region(region.descriptor())


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[int], Path]:
    def make(nbytes: int) -> Path:
        path = tmp_path / "data"
        path.write_bytes(pattern(2, nbytes).tobytes())
        return path

    return make


@each_way
@pytest.mark.parametrize("direct", [True, False])
def test_any_ranges_of_a_file_hold_what_was_written_and_nothing_else_changes(
    make_file: Callable[[int], Path], io: str, direct: bool
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - to repeat it
    chosen, size, offset = random.Random(seed), 3 * MIB + 1234, 777
    path = make_file(size)
    with opened(path, size - offset, offset, io=io, direct=direct, chunk_bytes=256 * KIB) as parts:
        engine, memory, place = parts
        expected, sent = bytearray(path.read_bytes()), bytes(memory.view())
        at, blocks = 0, []
        while at < size - offset:  # side by side, so that they share blocks of the file
            length = min(chosen.choice([1, 100, 511, 4096, 5000, 70_000, 400_000]), size - offset - at)
            local = chosen.randrange(size - offset - length + 1)
            if chosen.random() < 0.7:
                blocks.append([local, at, length])
                expected[offset + at : offset + at + length] = sent[local : local + length]
            at += length
        chosen.shuffle(blocks)
        engine.write(memory, place, blocks).wait(DEADLINE_S)
        assert path.read_bytes() == expected
        received = engine.allocate(size - offset)
        engine.read(received, place, [[0, 0, size - offset]]).wait(DEADLINE_S)
        assert received.view() == expected[offset:]


@each_way
def test_neighbours_in_one_block_are_never_torn_by_engines_and_processes_beside(
    make_file: Callable[[int], Path], io: str
) -> None:
    record, count, rounds = 100, 400, 5
    path = make_file(record * count)
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_files import write_records
from pathlib import Path
write_records(Path({str(path)!r}), 2, {record}, {count}, {rounds}, {io!r})
"""
    other = subprocess.Popen([sys.executable, "-c", program])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda who: write_records(path, who, record, count, rounds, io), range(2)))
    assert other.wait(60) == 0
    held = path.read_bytes()
    for index in range(count):
        assert held[index * record : (index + 1) * record] == bytes([index % 3 + 1]) * record, index


def write_records(path: Path, who: int, record: int, count: int, rounds: int, io: str) -> None:
    """Every third record of a file, again and again, through an engine of its own."""
    with opened(path, record * count, io=io) as (engine, memory, place):
        bytes_of(memory)[:] = who + 1
        blocks = [[0, index * record, record] for index in range(who, count, 3)]
        for _ in range(rounds):
            engine.write(memory, place, blocks).wait(DEADLINE_S)


@each_way
def test_a_file_that_was_cut_short_is_an_error_that_names_file_and_offset(
    make_file: Callable[[int], Path], io: str
) -> None:
    path = make_file(256 * KIB)
    with opened(path, 256 * KIB, io=io) as (engine, memory, place):
        os.truncate(path, 64 * KIB)
        with pytest.raises(TransferError) as caught:
            engine.read(memory, place, [[0, 128 * KIB, 4096]]).wait(DEADLINE_S)
        assert f"cannot read 4096 bytes at offset {128 * KIB} of" in str(caught.value)
        assert path.name in str(caught.value)
        assert "the file ends before the region" in str(caught.value)


@each_way
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_a_full_file_system_is_an_error_that_names_file_and_offset(tmp_path: Path, io: str) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "t", tmp_path], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        path = tmp_path / "sparse"
        path.touch()
        os.truncate(path, 4 * MIB)
        with opened(path, 4 * MIB, io=io) as (engine, memory, place):
            with pytest.raises(TransferError, match=r"cannot write \d+ bytes at offset \d+ of .*sparse"):
                engine.write(memory, place, [[0, 0, 4 * MIB]]).wait(DEADLINE_S)
            with pytest.raises(TransferError, match="No space left on device"):
                engine.write(memory, place, [[0, 0, 4 * MIB]]).wait(DEADLINE_S)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.fixture
def disk() -> Iterator[tuple[Path, Callable[[], None]]]:
    """A block device in memory, and what makes each later write to it fail: its memory is sealed."""
    if os.getuid() != 0 or not shutil.which("losetup"):
        pytest.skip("only root can make a block device, by losetup")
    fd = os.memfd_create("disk", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.truncate(fd, MIB)
    try:
        command = ["losetup", "--show", "-f", f"/proc/{os.getpid()}/fd/{fd}"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"this machine has no loop device to spare: {made.stderr.strip()}")
        device = Path(made.stdout.strip())
        try:
            yield device, lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE) or None
        finally:
            subprocess.run(["losetup", "-d", device], check=True)
    finally:
        os.close(fd)


@each_way
def test_what_a_block_device_cannot_do_is_an_io_error_and_the_rest_goes_on(
    disk: tuple[Path, Callable[[], None]], io: str
) -> None:
    device, break_it = disk
    with opened(device, MIB, io=io) as (engine, memory, place):
        engine.write(memory, place, [[0, 0, MIB]]).wait(DEADLINE_S)
        break_it()
        with pytest.raises(
            TransferError, match=r"cannot write 4096 bytes at offset 8192 of /dev/loop.*: Input/"
        ):
            engine.write(memory, place, [[0, 8192, 4096]]).wait(DEADLINE_S)
        bytes_of(memory)[:] = 0
        engine.read(memory, place, [[0, 0, MIB]]).wait(DEADLINE_S)
        assert memory.view() == pattern(1, MIB).tobytes()


@each_way
def test_a_write_that_was_cut_short_goes_on_until_it_fails(make_file: Callable[[int], Path], io: str) -> None:
    path = make_file(MIB)
    before = path.read_bytes()
    with opened(path, MIB, io=io) as (engine, memory, place):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512 * KIB, limits[1]))
        try:
            with pytest.raises(
                TransferError, match=rf"{512 * KIB} bytes at offset {512 * KIB} of .*too large"
            ):
                engine.write(memory, place, [[0, 0, MIB]]).wait(DEADLINE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == bytes(memory.view()[: 512 * KIB]) + before[512 * KIB :]


def test_a_file_for_reading_is_not_written(make_file: Callable[[int], Path]) -> None:
    path = make_file(64 * KIB)
    with TransferEngine(config()) as engine:
        memory = engine.allocate(64 * KIB)
        region = engine.register(FileSource(path, writable=False))
        place = engine.import_region(region.descriptor("r"))
        engine.read(memory, place, [[0, 0, 64 * KIB]]).wait(DEADLINE_S)
        assert memory.view() == path.read_bytes()
        with pytest.raises(RegionRefused, match="the key does not allow writing"):
            engine.write(memory, place, [[0, 0, 64 * KIB]]).wait(DEADLINE_S)


def test_two_files_are_no_transfer_and_the_reason_is_told(make_file: Callable[[int], Path]) -> None:
    with opened(make_file(64 * KIB), 64 * KIB) as (engine, _, place):
        file = engine.register(FileSource(__file__, writable=False))
        with pytest.raises(TransferError, match="go through a buffer in memory"):
            engine.read(file, place, [[0, 0, 64]]).wait(DEADLINE_S)


def sectors_written(path: Path) -> int:
    """Of the device that a file lies on; skips where it cannot be told."""
    number = path.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    if not stat.exists():
        pytest.skip("the temporary folder is on no block device of its own")
    return int(stat.read_text().split()[6])


@each_way
def test_a_durable_write_is_on_the_medium_when_it_is_complete(
    make_file: Callable[[int], Path], io: str
) -> None:
    size = 16 * MIB
    path = make_file(size)
    with opened(path, size, io=io, direct=False, durable=True) as (engine, memory, place):
        os.sync()
        before = sectors_written(path)
        engine.write(memory, place, [[0, 0, size]]).wait(DEADLINE_S)
        assert (sectors_written(path) - before) * 512 >= size


def rings() -> int:
    """How many io_urings this process has."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            names.append(str(entry.readlink()))
    return sum("io_uring" in name for name in names)


@pytest.mark.parametrize(("io", "count"), [("auto", 1), ("io_uring", 1), ("threads", 0)])
def test_the_ring_is_used_where_it_is_asked_for(
    make_file: Callable[[int], Path], io: str, count: int
) -> None:
    before = rings()
    with opened(make_file(64 * KIB), 64 * KIB, io=io):
        assert rings() - before == count
    assert rings() == before


def writes_by_this_process() -> int:
    """System calls that write; submitting to a ring is none."""
    return int(Path("/proc/self/io").read_text().split("syscw: ")[1].split()[0])


def test_who_waits_for_a_ring_is_not_woken_for_what_it_takes_itself(make_file: Callable[[int], Path]) -> None:
    with opened(make_file(8 * MIB), 8 * MIB, io="io_uring", in_flight=1) as (engine, memory, place):
        blocks = [[at, at, 256 * KIB] for at in range(0, 8 * MIB, 256 * KIB)]
        before = writes_by_this_process()
        engine.read(memory, place, blocks * 8).wait(DEADLINE_S)
        assert writes_by_this_process() - before < 2 * len(blocks)  # of eight times as many


FORBID = """
import ctypes, struct, sys
# A seccomp filter, as containers have it: io_uring_setup (425) fails with EPERM, the rest is allowed.
filter = b"".join(struct.pack("<HBBI", *step) for step in [
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)])
buffer = ctypes.create_string_buffer(filter)
program = struct.pack("@HxxxxxxP", 4, ctypes.addressof(buffer))
held = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(held)), 0, 0) == 0, ctypes.get_errno()
sys.path.insert(0, {tests!r})
import test_files
from pathlib import Path
"""


def run_forbidden(body: str) -> subprocess.CompletedProcess[str]:
    program = FORBID.format(tests=str(Path(__file__).parent)) + body
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


def test_threads_do_it_where_a_seccomp_filter_forbids_io_uring(make_file: Callable[[int], Path]) -> None:
    path = make_file(2 * MIB)
    done = run_forbidden(f"""
with test_files.opened(Path({str(path)!r}), {2 * MIB}) as (engine, memory, place):
    sent = bytes(memory.view())
    engine.write(memory, place, [[0, 0, {2 * MIB}]]).wait(20)
    memory.view()[:] = bytes({2 * MIB})
    engine.read(memory, place, [[0, 0, {2 * MIB}]]).wait(20)
    assert bytes(memory.view()) == sent
    print(test_files.rings())
""")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert path.read_bytes() == pattern(1, 2 * MIB).tobytes()


def test_who_insists_on_io_uring_is_told_why_there_is_none() -> None:
    done = run_forbidden("""
from mooncake_transfer import TransferEngine
try:
    TransferEngine(test_files.config(io="io_uring"))
except Exception as error:
    print(type(error).__name__, error)
""")
    assert DriverUnavailable.__name__ in done.stdout
    assert "seccomp" in done.stdout


def test_a_device_without_polled_io_is_read_as_usual(make_file: Callable[[int], Path]) -> None:
    path = make_file(MIB)
    with opened(path, MIB, polled=True) as (engine, memory, place):
        for _ in range(3):  # the first operations find out
            bytes_of(memory)[:] = 0
            engine.read(memory, place, [[0, 0, MIB]]).wait(DEADLINE_S)
            assert memory.view() == path.read_bytes()
        engine.write(memory, place, [[0, 0, MIB]]).wait(DEADLINE_S)
