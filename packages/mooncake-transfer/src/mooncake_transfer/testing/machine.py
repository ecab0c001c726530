"""A machine in a folder: ``sys`` and ``proc`` as a kernel would show them, for tests of topology."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["SysfsMachine"]


class SysfsMachine:
    """Builds the files that ``Topology.discover(root)`` reads. What is not added is not there.

    Attributes:
        root: the folder that holds ``sys`` and ``proc``.
    """

    def __init__(self, root: Path):
        self.root = root

    def write(self, path: str, text: object) -> Path:
        """Write one file below ``root``, with a newline as the kernel does."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def link(self, path: str, target: Path) -> None:
        """Make a relative link below ``root``, as sysfs has them."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def node(self, index: int, cpus: str, memory_mib: int, distances: str, **speed: int) -> None:
        """Add a NUMA node. ``speed``: read_latency, read_bandwidth ... as in ``access0/initiators``."""
        folder = f"sys/devices/system/node/node{index}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(f"{folder}/meminfo", f"Node {index} MemTotal:       {memory_mib * 1024} kB")
        self.write(f"{folder}/distance", distances)
        for name, value in speed.items():
            self.write(f"{folder}/access0/initiators/{name}", value)

    def pci(
        self, *path: str, node: int | None = None, vendor: str = "0x15b3", base: str = "0x020000"
    ) -> Path:
        """Add a PCI device by its root, bridges and own address; return its folder. ``node`` None: unsaid."""
        folder = self.root.joinpath("sys/devices", *path)
        place = folder.relative_to(self.root)
        new = not (self.root / f"sys/bus/pci/devices/{path[-1]}").is_symlink()
        self.write(f"{place}/class", base)
        self.write(f"{place}/vendor", vendor)
        self.write(f"{place}/device", "0x1234")
        if node is not None:
            self.write(f"{place}/numa_node", node)
        if new:
            self.link(f"sys/bus/pci/devices/{path[-1]}", folder)
        return folder

    def nic(self, name: str, device: Path | None, *, speed: object = 100_000, state: str = "up") -> None:
        """Add a NIC on a PCI device, or a virtual one."""
        base = self.root / "sys/devices/virtual" if device is None else device
        folder = (base / "net" / name).relative_to(self.root)
        self.write(f"{folder}/type", 1)
        self.write(f"{folder}/speed", speed)
        self.write(f"{folder}/operstate", state)
        if device is not None:
            self.link(f"{folder}/device", device)
        self.link(f"sys/class/net/{name}", self.root / folder)

    def rdma(
        self, name: str, device: Path | None, *, parent: str = "", rate: str = "100 Gb/sec (4X EDR)"
    ) -> None:
        """Add an RDMA device on a PCI device, or one in software over the NIC ``parent``."""
        base = self.root / "sys/devices/virtual" if device is None else device
        folder = (base / "infiniband" / name).relative_to(self.root)
        self.write(f"{folder}/ports/1/rate", rate)
        self.write(f"{folder}/ports/1/state", "4: ACTIVE")
        if parent:
            self.write(f"{folder}/parent", parent)
        if device is not None:
            self.link(f"{folder}/device", device)
        self.link(f"sys/class/infiniband/{name}", self.root / folder)

    def nvme(self, name: str, device: Path | None, *, gib: int = 1000) -> None:
        """Add a drive on a PCI device, or one reached over a network."""
        base = self.root / "sys/devices/virtual" if device is None else device
        folder = (base / "nvme" / name).relative_to(self.root)
        self.write(f"{folder}/transport", "tcp" if device is None else "pcie")
        self.write(f"{folder}/state", "live")
        self.write(f"{folder}/model", "Example Drive")
        self.write(f"{folder}/{name}n1/size", gib << 21)
        if device is not None:
            self.link(f"{folder}/device", device)
        self.link(f"sys/class/nvme/{name}", self.root / folder)
