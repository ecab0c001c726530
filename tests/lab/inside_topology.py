"""Runs inside the guest: what `mooncake topology` says of it, and where allocated memory really lies."""

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.cli import build_app
from mooncake_transfer.errors import MemoryUnavailable
from mooncake_transfer.memory import FileSource, Memory, allocate_shareable, file_source, wrap

MIB = 1 << 20


def main() -> None:
    """Write one JSON document to standard output."""
    report = {
        "text": CliRunner().invoke(build_app(), ["topology"]).output,
        "svg": drawing(),
        "topology": json.loads(CliRunner().invoke(build_app(), ["topology", "--json"]).output),
        "bound": {str(node): bound_pages(node) for node in (0, 1, 2)},
        "huge": huge_pages(),
        "drive": drive(),
        "transfer": transfer_to_far_memory(),
    }
    json.dump(report, sys.stdout)


def drawing() -> str:
    """What `mooncake topology --svg` draws."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.svg"
        CliRunner().invoke(build_app(), ["topology", "--svg", str(file)])
        return file.read_text()


def numa_maps_of(memory: Memory) -> str:
    """What the kernel says of the mapping at the memory's address."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{memory.address:08x} "))


def bound_pages(node: int) -> dict[str, object]:
    """Allocate on a node, touch every page, and tell where they lie, also by a second look at it."""
    memory = allocate_shareable(4 * MIB, f"on-{node}", numa_node=node)
    ctypes.memset(memory.address, 1, memory.nbytes)
    seen = wrap((ctypes.c_ubyte * memory.nbytes).from_address(memory.address)).numa_node
    report = {"maps": numa_maps_of(memory), "told": memory.numa_node, "seen": seen}
    memory.close()
    return report


def huge_pages() -> dict[str, str]:
    """Allocate on huge pages of a node, then ask for more than there are."""
    memory = allocate_shareable(3 * MIB, "huge", huge_pages="2M", numa_node=1)
    report = {"maps": numa_maps_of(memory), "nbytes": str(memory.nbytes)}
    try:
        allocate_shareable(1 << 30, "too much", huge_pages="2M")
    except MemoryUnavailable as error:
        report["refusal"] = str(error)
    memory.close()
    return report


def drive() -> dict[str, object]:
    """Describe an NVMe drive of node 1 as a region, and write to it by what a driver would get."""
    # The kernel numbers drives as they answer, so either may be the one of node 1.
    name = next(f"nvme{n}" for n in (0, 1) if Path(f"/sys/class/nvme/nvme{n}/numa_node").read_text() == "1\n")
    memory = file_source(FileSource(f"/dev/{name}n1", offset=4096))
    os.pwrite(memory.fd, b"block", memory.fd_offset)
    content = os.pread(memory.fd, 5, memory.fd_offset).decode()
    report = {"kind": memory.kind.name, "nbytes": memory.nbytes, "node": memory.numa_node, "content": content}
    memory.close()
    return report


def transfer_to_far_memory() -> int:
    """Move bytes between far memory and huge pages by the driver shm; count what arrived."""
    config = TransferConfig(drivers=("shm",))
    with TransferEngine(config) as owner, TransferEngine(config) as user:
        far = owner.register(allocate_shareable(MIB, "far", numa_node=2))
        near = user.register(allocate_shareable(2 * MIB, "near", huge_pages="2M"))
        far.view()[:] = b"far " * (MIB // 4)
        remote = user.import_region(far.descriptor(), timeout_s=60)
        user.read(near, remote, [[0, 0, MIB]]).wait(60)
        return bytes(near.view()[:MIB]).count(b"far ")


if __name__ == "__main__":
    main()
