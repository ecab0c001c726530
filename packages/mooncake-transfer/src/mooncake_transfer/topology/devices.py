"""NICs, RDMA devices, NVMe drives and GPUs from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from mooncake_transfer.topology.model import Device, DeviceKind
from mooncake_transfer.topology.nvml import GpuInfo
from mooncake_transfer.topology.sysfs import Tree, natural_order

__all__ = ["read_devices"]

NET = "sys/class/net"
RDMA = "sys/class/infiniband"
NVME = "sys/class/nvme"
PCI = "sys/bus/pci/devices"
LOOPBACK = 772  # ARPHRD_LOOPBACK
DISPLAY, ACCELERATOR = "0x03", "0x12"  # PCI base classes
# Whose display controllers compute; others, such as that of a server's management chip, only show text.
GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}


def read_devices(
    tree: Tree, addresses: Mapping[str, Sequence[str]], gpus: Mapping[str, GpuInfo]
) -> list[Device]:
    """Return what is there. ``addresses``: of each NIC; ``gpus``: by PCI address, what their driver says."""
    nics = {nic.name: nic for nic in _read_nics(tree, addresses)}
    return [
        *nics.values(),
        *_read_rdma(tree, nics),
        *_read_nvme(tree),
        *_read_gpus(tree, gpus),
    ]


def _read_nics(tree: Tree, addresses: Mapping[str, Sequence[str]]) -> Iterator[Device]:
    for name in tree.names(NET):
        folder = f"{NET}/{name}"
        if (
            tree.number(f"{folder}/type", LOOPBACK) == LOOPBACK
        ):  # also what is no NIC, such as bonding_masters
            continue
        path = tree.pci_path(f"{folder}/device")
        yield Device(
            name=name,
            kind=DeviceKind.NIC,
            pci=path[-1] if path else "",
            path=path,
            numa_node=tree.numa_node(path),
            state=tree.text(f"{folder}/operstate"),
            bandwidth_bytes_per_s=max(0, tree.number(f"{folder}/speed")) * 125_000,  # from Mbit/s
            addresses=tuple(addresses.get(name, ())),
            model=_pci_model(tree, path),
        )


def _read_rdma(tree: Tree, nics: Mapping[str, Device]) -> Iterator[Device]:
    for name in tree.names(RDMA):
        folder = f"{RDMA}/{name}"
        # A device in software names the NIC that it uses; one in hardware shares its PCI function with one.
        parents = tree.names(f"{folder}/device/net") or tree.text(f"{folder}/parent").split()
        known = [nics[parent] for parent in parents if parent in nics]
        path = tree.pci_path(f"{folder}/device") or (known[0].path if known else ())
        ports = tree.names(f"{folder}/ports")
        port = f"{folder}/ports/{ports[0]}" if ports else ""
        yield Device(
            name=name,
            kind=DeviceKind.RDMA,
            pci=path[-1] if path else "",
            path=path,
            numa_node=tree.numa_node(path),
            state=tree.text(f"{port}/state").partition(":")[2].strip().lower() if port else "",
            bandwidth_bytes_per_s=_rate(tree.text(f"{port}/rate")) if port else 0,
            addresses=tuple(address for nic in known for address in nic.addresses),
            netdevs=tuple(parents),
            model=tree.text(f"{folder}/hca_type"),
        )


def _rate(text: str) -> int:
    """Bytes per second of a port's rate, such as ``100 Gb/sec (4X EDR)``."""
    found = re.match(r"([0-9.]+) Gb/sec", text)
    return int(float(found[1]) * 125_000_000) if found else 0


def _read_nvme(tree: Tree) -> Iterator[Device]:
    for name in tree.names(NVME):
        folder = f"{NVME}/{name}"
        path = tree.pci_path(f"{folder}/device") if tree.text(f"{folder}/transport") in ("pcie", "") else ()
        # A drive's namespaces: nvme0n1, or nvme0c0n1 where the kernel joins several ways to it.
        space = [entry for entry in tree.names(folder) if re.match(rf"{name}(c\d+)?n\d+$", entry)]
        sectors = sum(tree.number(f"{folder}/{entry}/size") for entry in space)
        yield Device(
            name=name,
            kind=DeviceKind.NVME,
            pci=path[-1] if path else "",
            path=path,
            numa_node=tree.numa_node(path),
            state=tree.text(f"{folder}/state"),
            memory_bytes=sectors * 512,  # sysfs counts sectors of 512 bytes whatever the drive's are
            model=tree.text(f"{folder}/model"),
        )


def _read_gpus(tree: Tree, gpus: Mapping[str, GpuInfo]) -> Iterator[Device]:
    found = 0
    for address in sorted(tree.names(PCI), key=natural_order):
        folder = f"{PCI}/{address}"
        base, vendor = tree.text(f"{folder}/class")[:4], tree.text(f"{folder}/vendor")
        if base != ACCELERATOR and not (base == DISPLAY and vendor in GPU_VENDORS):
            continue
        path = tree.pci_path(folder)
        told = gpus.get(address, GpuInfo())
        yield Device(
            name=f"gpu{found}",
            kind=DeviceKind.GPU,
            pci=address,
            path=path,
            numa_node=tree.numa_node(path),
            state="live" if tree.exists(f"{folder}/driver") else "without driver",
            memory_bytes=told.memory_bytes,
            model=told.model or _proc_model(tree, address) or _pci_model(tree, path),
        )
        found += 1


def _proc_model(tree: Tree, address: str) -> str:
    """What NVIDIA's kernel module calls a GPU; there also without its library, as in a small container."""
    for line in tree.text(f"proc/driver/nvidia/gpus/{address}/information").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return ""


def _pci_model(tree: Tree, path: tuple[str, ...]) -> str:
    """Vendor and device as numbers; names would need a database that containers lack."""
    if not path:
        return ""
    folder = f"{PCI}/{path[-1]}"
    vendor, device = tree.text(f"{folder}/vendor"), tree.text(f"{folder}/device")
    return f"{vendor.removeprefix('0x')}:{device.removeprefix('0x')}" if vendor else ""
