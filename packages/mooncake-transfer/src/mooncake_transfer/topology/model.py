"""The things of a topology: nodes, devices, distances. Plain data."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Device", "DeviceKind", "Distance", "NumaNode"]


class DeviceKind(str, enum.Enum):
    """What a device is."""

    NIC = "nic"
    RDMA = "rdma"
    NVME = "nvme"
    GPU = "gpu"


class Distance(enum.IntEnum):
    """How far two devices, or a device and a node, are from one another: what data has to cross."""

    SAME_DEVICE = 0
    """One PCI card, such as a NIC and its RDMA function."""
    SAME_SWITCH = 1
    """One PCI switch; no CPU in between."""
    SAME_ROOT = 2
    """One PCI root complex."""
    SAME_NODE = 3
    """One NUMA node, different root complexes."""
    OTHER_NODE = 4
    """The link between two NUMA nodes."""
    UNKNOWN = 5
    """The machine does not say where one of them is."""

    @property
    def label(self) -> str:
        """Its name for people, such as ``same switch``."""
        return self.name.lower().replace("_", " ")


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node.

    Attributes:
        index: the kernel's number of it.
        cpus: its CPUs; none for far memory, such as CXL.
        memory_bytes: its memory, 0 when it has none.
        distances: to each node of the topology, in their order; 10 is local.
        tier: number of the kernel's memory tier, lower is faster; -1 when it keeps none.
        read_latency_ns: from the nearest CPUs by the firmware's tables (HMAT); 0 when they do not say.
        write_latency_ns: the same for writes.
        read_bandwidth_bytes_per_s: the same for bandwidth.
        write_bandwidth_bytes_per_s: the same for the bandwidth of writes.
    """

    index: int
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    distances: tuple[int, ...] = ()
    tier: int = -1
    read_latency_ns: int = 0
    write_latency_ns: int = 0
    read_bandwidth_bytes_per_s: int = 0
    write_bandwidth_bytes_per_s: int = 0

    @property
    def is_far(self) -> bool:
        """Whether it is memory only."""
        return not self.cpus and self.memory_bytes > 0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device that data comes from or goes to.

    Attributes:
        name: as the system calls it, such as ``eth0``, ``mlx5_0``, ``nvme1``; ``gpu0`` ... by PCI address.
        kind: what it is.
        pci: its PCI address; empty for one without, such as a bridge or a tunnel.
        path: PCI root complex and the bridges from there to the device, which is last.
        numa_node: the node it is attached to; -1 when the machine does not say.
        state: ``up``, ``down``, ``live`` ... as the system says; empty when it does not.
        bandwidth_bytes_per_s: of its port, or its memory for a GPU where that is known; 0: unknown.
        addresses: of a NIC or of the NIC of an RDMA device: IP addresses, the first one first.
        netdevs: of an RDMA device: its NICs.
        memory_bytes: size of a drive or of a GPU's memory; 0: unknown.
        model: what the vendor calls it.
    """

    name: str
    kind: DeviceKind
    pci: str = ""
    path: tuple[str, ...] = ()
    numa_node: int = -1
    state: str = ""
    bandwidth_bytes_per_s: int = 0
    addresses: tuple[str, ...] = ()
    netdevs: tuple[str, ...] = ()
    memory_bytes: int = 0
    model: str = ""


def pci_distance(one: Device, other: Device) -> Distance:
    """Compare two devices by their places in the PCI tree; UNKNOWN when these have nothing in common."""
    if one.name == other.name or one.name in other.netdevs or other.name in one.netdevs:
        return Distance.SAME_DEVICE
    if not one.path or not other.path:
        return Distance.UNKNOWN
    if one.path[:-1] == other.path[:-1] and _card(one) == _card(other):
        return Distance.SAME_DEVICE
    common = 0
    for a, b in zip(one.path, other.path, strict=False):
        if a != b:
            break
        common += 1
    # Below a shared bridge there are several devices only when there is a switch.
    return Distance.SAME_SWITCH if common > 1 else Distance.SAME_ROOT if common else Distance.UNKNOWN


def _card(device: Device) -> str:
    return device.pci.rpartition(".")[0]
