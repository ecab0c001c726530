"""Memory the engine allocates: shareable, huge pages, NUMA nodes; and files as memory."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from mooncake_transfer._memory import files, shareable
from mooncake_transfer.errors import ConfigError, MemoryUnavailable
from mooncake_transfer.memory import (
    FileSource,
    Memory,
    MemoryKind,
    allocate_shareable,
    file_source,
    nodes_with_memory,
)

MIB = 1 << 20


def smaps_of(memory: Memory) -> dict[str, int]:
    """What the kernel says of the mapping at the memory's address, in bytes."""
    wanted, found = f"{memory.address:x}-", False
    fields = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split()[0]:
            found = line.startswith(wanted)
        elif found and value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("name", ["漢" * 85, "x" * 255, "a" + "漢" * 84])
def test_a_region_is_named_in_any_script(name: str) -> None:
    memory = allocate_shareable(4096, name)
    shown = str(Path(f"/proc/self/fd/{memory.fd}").readlink())
    cut = shown.removeprefix("/memfd:mooncake-").removesuffix(" (deleted)")
    assert len(cut) > 70
    assert name.startswith(cut)
    memory.close()


def test_another_mapping_of_the_descriptor_shows_the_same_bytes() -> None:
    memory = allocate_shareable(3 * MIB + 5, "shared")
    with mmap.mmap(memory.fd, memory.nbytes) as other:
        ctypes.memset(memory.address, 7, memory.nbytes)
        assert other[0] == other[memory.nbytes - 1] == 7
    memory.close()
    assert memory.fd == -1
    assert ctypes.string_at(memory.address, 1) == b"\x07"


def test_a_region_costs_one_descriptor_and_gives_it_and_its_mapping_back() -> None:
    before, mappings = open_descriptors(), _mappings("gone-soon")
    kept = [allocate_shareable(4096, "gone-soon") for _ in range(20)]
    assert open_descriptors() == before + 20
    assert _mappings("gone-soon") == mappings + 20
    for memory in kept:
        memory.close()
    kept.clear()
    del memory
    assert open_descriptors() == before
    assert _mappings("gone-soon") == mappings


def _mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"mooncake-{name}")


def test_the_size_is_sealed() -> None:
    memory = allocate_shareable(4096, "sealed")
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 8192)
    memory.close()


def test_prefaulted_pages_are_there() -> None:
    memory = allocate_shareable(4 * MIB, "backed", prefault=True)
    assert smaps_of(memory)["Rss"] == 4 * MIB
    memory.close()


def test_memory_is_bound_to_the_node_asked_for() -> None:
    node = nodes_with_memory()[-1]
    memory = allocate_shareable(2 * MIB, "bound", numa_node=node, prefault=True)
    assert memory.numa_node == node
    line = next(
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if line.startswith(f"{memory.address:08x} ")
    )
    assert f"bind:{node}" in line
    assert f"N{node}=" in line
    memory.close()


@pytest.mark.parametrize("node", [-1, 4095])
def test_a_node_without_memory_is_refused_with_those_that_have_some(node: int) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=rf"NUMA node {node} .*nodes with memory: 0"):
        allocate_shareable(4096, "nowhere", numa_node=node)
    assert open_descriptors() == before


@pytest.mark.parametrize("size", ["4K", "big", 7])
def test_an_unknown_page_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="huge_pages is"):
        allocate_shareable(4096, "odd", huge_pages=size)


def test_missing_huge_pages_are_named_with_the_remedy() -> None:
    pages = _free_huge_pages() + 1000
    size = pages * shareable.huge_page_bytes(True)
    with pytest.raises(
        MemoryUnavailable, match=rf"needs {pages} huge pages.*echo \d+ > /proc/sys/vm/nr_hugepages"
    ):
        allocate_shareable(size, "huge", huge_pages=True)


def test_huge_pages_hold_the_region_when_there_are_any() -> None:
    page = shareable.huge_page_bytes(True)
    if _free_huge_pages() < 2:
        pytest.skip("fewer than 2 huge pages are free on this machine (/proc/sys/vm/nr_hugepages)")
    memory = allocate_shareable(page + 1, "huge", huge_pages=True, prefault=True)
    assert memory.nbytes == 2 * page
    assert smaps_of(memory)["KernelPageSize"] == page
    memory.close()


def test_the_kernel_makes_huge_pages_of_common_memory() -> None:
    before = Path("/proc/self/maps").read_text().count("---p")
    try:
        memory = allocate_shareable(3 * MIB, "large", huge_pages="transparent")
    except MemoryUnavailable as error:
        pytest.skip(str(error))
    page = shareable.transparent_huge_page_bytes()
    assert (memory.nbytes % page, memory.address % page) == (0, 0)
    assert smaps_of(memory)["Rss"] == memory.nbytes
    assert smaps_of(memory)["ShmemPmdMapped"] in range(0, memory.nbytes + 1, page)  # as room was found
    assert ctypes.string_at(memory.address, memory.nbytes) == bytes(memory.nbytes)
    memory.close()
    assert Path("/proc/self/maps").read_text().count("---p") == before  # no reserved room is left


def test_a_kernel_without_transparent_huge_pages_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shareable, "TRANSPARENT_SIZE", tmp_path / "none")
    with pytest.raises(MemoryUnavailable, match="use huge_pages=True or False"):
        allocate_shareable(MIB, "large", huge_pages="transparent")


def _free_huge_pages() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["HugePages_Free"])


def test_a_file_is_a_region_without_an_address(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 10_000)
    whole, part = file_source(FileSource(path)), file_source(FileSource(str(path), offset=4096, nbytes=100))
    assert (whole.kind, whole.address, whole.nbytes, whole.fd_offset) == (MemoryKind.FILE, 0, 10_000, 0)
    assert (part.nbytes, part.fd_offset, part.writable) == (100, 4096, True)
    assert os.pwrite(part.fd, b"y", part.fd_offset) == 1
    assert path.read_bytes()[4096:4097] == b"y"
    whole.close()
    part.close()


def test_an_open_file_is_duplicated(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    with path.open("rb") as file:
        memory = file_source(FileSource(file.fileno(), writable=False))
        assert memory.fd != file.fileno()
        with pytest.raises(ConfigError, match="not open for reading and writing"):
            file_source(FileSource(file.fileno()))
    assert os.pread(memory.fd, 3, 0) == b"xxx"
    assert not memory.writable
    memory.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 101), (100, 1), (-1, 10), (0, 0), (50, -1), (100, None), (1 << 70, 1)]
)
def test_a_part_outside_the_file_is_refused(tmp_path: Path, offset: int, nbytes: int | None) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * 100)
    before = open_descriptors()
    with pytest.raises(ConfigError, match="holds 100 bytes"):
        file_source(FileSource(path, offset, nbytes))
    assert open_descriptors() == before


@pytest.mark.parametrize("path", ["missing", ".", "/dev/null"])
def test_what_is_no_file_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot open|no file and no block device"):
        file_source(FileSource(tmp_path / path))


@pytest.mark.parametrize(
    ("drive", "controllers", "node"),
    [
        ("devices/pci0000:40/0000:41:00.0/nvme/nvme0/nvme0n1", {"devices/pci0000:40/0000:41:00.0": "1"}, 1),
        ("devices/virtual/nvme-subsystem/s0/nvme0n1", {"devices/virtual/nvme-subsystem/s0/nvme0": "1"}, 1),
        (
            "devices/virtual/nvme-subsystem/s0/nvme0n1",
            {"devices/virtual/nvme-subsystem/s0/nvme0": "1", "devices/virtual/nvme-subsystem/s0/nvme1": "0"},
            -1,
        ),
        ("devices/virtual/block/ram0", {}, -1),
    ],
)
def test_a_file_lies_on_the_node_of_the_controller_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: str, controllers: dict[str, str], node: int
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    device = path.stat().st_dev
    (tmp_path / drive).mkdir(parents=True)
    for folder, text in controllers.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "numa_node").write_text(f"{text}\n")
    (tmp_path / f"{os.major(device)}:{os.minor(device)}").symlink_to(drive)
    monkeypatch.setattr(files, "BLOCKS", tmp_path)
    memory = file_source(FileSource(path))
    assert memory.numa_node == node
    memory.close()
