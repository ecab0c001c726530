"""Runs inside the guest: the kernel's NVMe target, used by its own initiator and by ours."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_driver_nvmeof import fabrics, namespace
from mooncake_transfer import RailConfig, Region, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, TransferError
from mooncake_transfer.memory import FileSource

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
SIZE = MIB
DEADLINE_S = 150.0
NQN = os.environ["VMLAB_NVMET_NQN"]
PORTS = Path("/sys/kernel/config/nvmet/ports")


def say(**facts: Any) -> None:
    """One line for the test outside, and progress for people."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll; return the first true value."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.05)
    return value


def address(kind: str) -> str:
    """Where the kernel's target listens; empty for loop."""
    return "" if kind == "loop" else os.environ[f"VMLAB_NVMET_{kind.upper()}"].split(":")[0]


def discovered(kind: str) -> bool:
    """Whether the target's discovery service tells of our subsystem."""
    found = fabrics.discover(address(kind), transport=kind, timeout_s=DEADLINE_S)
    ours = [each for each in found if (each.nqn, each.transport) == (NQN, kind)]
    return any(kind == "loop" or (each.address, each.service) == (address(kind), "4420") for each in ours)


def connect(kind: str) -> dict[int, Path]:
    """Connect the kernel's initiator; return the block devices of the subsystem, by namespace."""
    found = fabrics.connect(NQN, address(kind), transport=kind, loss_timeout_s=60, timeout_s=DEADLINE_S)
    return {each.nsid: each.device for each in found}


def disconnect() -> None:
    """Disconnect the kernel's initiator; nothing is left of it."""
    fabrics.disconnect(NQN, timeout_s=DEADLINE_S)
    left = [each.device for each in fabrics.block_namespaces() if each.subsystem == NQN]
    assert not left, f"disconnected, but {left} are there"


def kernel_reads(device: Path, offset: int, nbytes: int) -> Bytes:
    """What the kernel's initiator reads, past every cache."""
    fd = os.open(device, os.O_RDONLY | os.O_DIRECT)
    place = mmap.mmap(-1, nbytes)
    try:
        assert os.preadv(fd, [place], offset) == nbytes
        return np.frombuffer(place, np.uint8).copy()
    finally:
        os.close(fd)


def pattern(seed: int, nbytes: int = SIZE) -> Bytes:
    """Bytes that are the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def engine(**options: Any) -> TransferEngine:
    """With the nvmeof driver alone, that says what happens at once."""
    return TransferEngine(
        TransferConfig(
            drivers=("nvmeof",),
            driver_options={
                "nvmeof": {"connect_timeout_s": 60.0, "fence_s": 1.0, "keep_alive_s": 0.0, **options}
            },
            rails=RailConfig(attempts=1, breaker_errors=1000),
            transfer_timeout_s=DEADLINE_S,
        )
    )


def memory_of(owner: TransferEngine, nbytes: int = SIZE) -> tuple[Region, Bytes]:
    region = owner.allocate(nbytes)
    return region, np.frombuffer(region.view(), np.uint8)


def block_device(kind: str, seed: int) -> None:
    """A namespace as a block device of the kernel's initiator."""
    told = discovered(kind)
    devices = connect(kind)
    again = connect(kind) == devices
    device = devices[1]
    with engine() as owner:
        local, held = memory_of(owner)
        place = owner.import_region(owner.register(FileSource(device, 0, 2 * SIZE)).descriptor())
        held[:] = pattern(seed)
        owner.write(local, place, [[0, 4096, SIZE]]).wait()
        same = np.array_equal(kernel_reads(device, 4096, SIZE), held)
        held[:] = 0
        owner.read(local, place, [[0, 4096, SIZE]]).wait()
        aligned = same and np.array_equal(held, pattern(seed))
        owner.write(local, place, [[0, 1000, 5001]]).wait()  # reads, changes and writes blocks
        now = kernel_reads(device, 0, 8192)
        edges = np.array_equal(now[1000:6001], held[:5001]) and np.array_equal(now[6001:], held[1905:4096])
    say(block_device=kind, aligned=bool(aligned), unaligned=bool(edges),
        discovered=told, namespaces=sorted(devices), again=again)  # fmt: skip
    disconnect()


def userspace(nsid: int, seed: int, **digests: bool) -> None:
    """Our initiator against the kernel's target, what it wrote seen by the kernel's initiator."""
    found = namespace(
        f"nvme-tcp://{os.environ['VMLAB_NVMET_TCP']}/{NQN}?nsid={nsid}", timeout_s=60, **digests
    )
    with engine(**digests) as owner:
        local, held = memory_of(owner)
        place = owner.import_region(owner.register(found.source()).descriptor())
        held[:] = pattern(seed)
        owner.write(local, place, [[0, MIB, SIZE]]).wait()
        owner.write(local, place, [[7, 3, 1000]]).wait()
        held[:] = 0
        owner.read(local, place, [[0, MIB, SIZE]]).wait()
        ours = np.array_equal(held, pattern(seed))
    device = connect("tcp")[nsid]
    theirs = np.array_equal(kernel_reads(device, MIB, SIZE), pattern(seed))
    small = np.array_equal(kernel_reads(device, 0, 4096)[3:1003], pattern(seed)[7:1007])
    told = (Path("/sys/block") / device.name / "uuid").read_text().strip().replace("-", "")
    disconnect()
    say(userspace=nsid, digests=digests, ours=bool(ours), theirs=bool(theirs), small=bool(small),
        uuid=found.uuid.hex() == told, nbytes=found.nbytes)  # fmt: skip


def port(kind: str) -> Path:
    """What makes the subsystem reachable at the target's port of that transport."""
    (found,) = [each for each in PORTS.iterdir() if (each / "addr_trtype").read_text().strip() == kind]
    return found / "subsystems" / NQN


def unlink(kind: str) -> None:
    """Take the target's port away: its connections end, new ones are refused."""
    port(kind).unlink()


def link(kind: str) -> None:
    port(kind).symlink_to(f"/sys/kernel/config/nvmet/subsystems/{NQN}")


def moves(move: Callable[[], Transfer]) -> bool:
    try:
        move().wait()
    except PeerUnreachable:
        return False
    return True


def taken_away() -> None:
    """Under load of both initiators: ours reports the loss, the kernel's waits; afterwards both go on."""
    device = connect("tcp")[1]
    found = namespace(f"nvme-tcp://{os.environ['VMLAB_NVMET_TCP']}/{NQN}?nsid=2", timeout_s=60)
    with engine() as owner:
        local, held = memory_of(owner)
        held[:] = pattern(50)
        ours = owner.import_region(owner.register(found.source()).descriptor())
        theirs = owner.import_region(owner.register(FileSource(device, 0, 8 * SIZE)).descriptor())
        many = [[0, 2 * MIB, SIZE]] * 200
        lost, waiting = owner.write(local, ours, many), owner.write(local, theirs, many[:24])
        until(lambda: lost.bytes_done > 0 and waiting.bytes_done > 0, "both move bytes")
        unlink("tcp")
        error = ""
        try:
            lost.wait()
        except PeerUnreachable as failure:
            error = str(failure)
        refused = not moves(lambda: owner.read(local, ours, [[0, 0, 4096]]))
        held[:] = pattern(50)  # the refused read may have changed nothing
        link("tcp")
        until(lambda: moves(lambda: owner.write(local, ours, [[0, 2 * MIB, SIZE]])), "the target is back")
        waiting.wait()
        place, received = memory_of(owner)
        owner.read(place, ours, [[0, 2 * MIB, SIZE]]).wait()
        same_ours = np.array_equal(received, pattern(50))
        owner.read(place, theirs, [[0, 2 * MIB, SIZE]]).wait()
        same_theirs = np.array_equal(received, pattern(50))
        say(taken_away=True, error=error, refused=refused,
            ours=bool(same_ours), theirs=bool(same_theirs))  # fmt: skip
    disconnect()


def taken_from_the_kernel(kind: str, seed: int) -> None:
    """Under load of the kernel's initiator: over rdma it waits and goes on, over loop its device is gone."""
    device = connect(kind)[1]
    error = ""
    with engine() as owner:
        local, held = memory_of(owner)
        held[:] = pattern(seed)
        place = owner.import_region(owner.register(FileSource(device, 0, 8 * SIZE)).descriptor())
        # Loop is a copy in memory, and the way of its port takes some time.
        moving = owner.write(local, place, [[0, 2 * MIB, SIZE]] * (200 if kind == "rdma" else 5000))
        until(lambda: moving.bytes_done > 0, "it moves bytes")
        unlink(kind)
        left = moving.nbytes - moving.bytes_done
        if kind == "rdma":
            link(kind)
        try:
            moving.wait()
        except TransferError as failure:
            error = str(failure)
    if kind == "loop":
        link(kind)
        device = connect(kind)[1]
    with engine() as owner:
        local, held = memory_of(owner)
        held[:] = pattern(seed + 1)
        place = owner.import_region(owner.register(FileSource(device, 0, 8 * SIZE)).descriptor())
        owner.write(local, place, [[0, 4 * MIB, SIZE]]).wait()
        again = np.array_equal(kernel_reads(device, 4 * MIB, SIZE), held)
    whole = np.array_equal(kernel_reads(device, 2 * MIB, SIZE), pattern(seed))
    say(taken_from_the_kernel=kind, left=left, error=error, whole=bool(whole), again=bool(again))
    disconnect()


def completed() -> list[int]:
    """How many entries each io_uring of this process has completed, in the order in which they were made."""
    descriptors = sorted(Path("/proc/self/fd").iterdir(), key=lambda each: int(each.name))
    rings = [each.name for each in descriptors if each.is_symlink() and "io_uring" in str(each.readlink())]
    infos = [(Path("/proc/self/fdinfo") / each).read_text() for each in rings]
    return [int(info.split("CqTail:")[1].split()[0]) for info in infos]


def passthrough(seed: int) -> None:
    """A PCI drive with the option passthrough."""
    # Beside the drive there may be its paths, such as nvme0c0n1.
    (place,) = [each for each in Path("/sys/block").glob("nvme*n*") if "c" not in each.name]
    device = Path("/dev") / place.name
    blocks = [[at, at + MIB, 65536] for at in range(0, SIZE, 65536)]
    # The emulated drive takes 512 KiB in one command; what is longer goes by the block layer.
    with engine(passthrough=True, chunk_bytes=65536) as owner:
        local, held = memory_of(owner)
        part = owner.import_region(owner.register(FileSource(device, 0, 8 * SIZE)).descriptor())
        opened = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
        held[:] = pattern(seed)
        before = completed()
        owner.write(local, part, blocks).wait()
        same = np.array_equal(kernel_reads(device, MIB, SIZE), held)
        held[:] = 0
        owner.read(local, part, blocks).wait()
        common, commands = (now - then for now, then in zip(completed(), before, strict=True))
        back = np.array_equal(held, pattern(seed))
        owner.write(local, part, [[0, 100, 1000]]).wait()  # a part of a block goes by the block layer
        edge = np.array_equal(kernel_reads(device, 0, 4096)[100:1100], held[:1000])
    say(passthrough=True, same=bool(same), back=bool(back), edge=bool(edge), common=common,
        commands=commands, opened="/dev/ng" + device.name[4:] in opened)  # fmt: skip


def main() -> None:
    """All of it, one after another, in one boot."""
    passthrough(5)
    for seed, kind in enumerate(("tcp", "rdma", "loop"), 10):
        block_device(kind, seed)
    userspace(1, 20)
    userspace(2, 21, header_digest=True, data_digest=True)
    taken_away()
    taken_from_the_kernel("rdma", 60)
    taken_from_the_kernel("loop", 70)


if __name__ == "__main__":
    main()
