"""How amounts and places of a topology are written, the same in the text and the drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from mooncake_transfer.topology.model import Device, DeviceKind, Distance, NumaNode

__all__ = [
    "by_root",
    "device_facts",
    "format_bandwidth",
    "format_bytes",
    "format_cpus",
    "node_facts",
    "short_distance",
    "summary",
]

KINDS = {
    DeviceKind.NIC: "NIC",
    DeviceKind.RDMA: "RDMA device",
    DeviceKind.NVME: "drive",
    DeviceKind.GPU: "GPU",
}
SHORT = {
    Distance.SAME_DEVICE: "card",
    Distance.SAME_SWITCH: "switch",
    Distance.SAME_ROOT: "root",
    Distance.SAME_NODE: "node",
    Distance.OTHER_NODE: "far",
    Distance.UNKNOWN: "?",
}


def format_bytes(amount: int) -> str:
    """``128 GiB``; three digits at most."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}" if amount < 1000 * size else f"{amount / size:.0f} {unit}"
    return f"{amount} B"


def format_bandwidth(bytes_per_s: int) -> str:
    """A port's speed as vendors write it: ``100 Gb/s``."""
    return f"{bytes_per_s * 8 / 1e9:g} Gb/s"


def format_cpus(cpus: Sequence[int]) -> str:
    """The kernel's list format: ``0-3,8``."""
    runs = []
    for _, run in groupby(enumerate(cpus), key=lambda item: item[1] - item[0]):
        numbers = [cpu for _, cpu in run]
        runs.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return ",".join(runs)


def node_facts(node: NumaNode) -> list[str]:
    """What is worth saying of a node, the most important first."""
    facts = [f"CPUs {format_cpus(node.cpus)}" if node.cpus else "no CPUs", format_bytes(node.memory_bytes)]
    if node.read_latency_ns:
        facts.append(f"{node.read_latency_ns} ns")
    if node.read_bandwidth_bytes_per_s:
        facts.append(f"{node.read_bandwidth_bytes_per_s / 1e9:.3g} GB/s")
    if node.tier >= 0:
        facts.append(f"tier {node.tier}")
    return facts


def device_facts(device: Device) -> list[str]:
    """What is worth saying of a device besides its name and place."""
    facts = [device.state] if device.state and device.state != "unknown" else []
    if device.bandwidth_bytes_per_s:
        facts.append(format_bandwidth(device.bandwidth_bytes_per_s))
    if device.memory_bytes:
        facts.append(format_bytes(device.memory_bytes))
    if device.netdevs:
        facts.append(f"over {', '.join(device.netdevs)}")
    elif device.addresses:
        facts.append(device.addresses[0])
    return facts


def by_root(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Group devices by their PCI root; those without one under the empty name, last."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.path[0] if device.path else "", []).append(device)
    return dict(sorted(groups.items(), key=lambda item: (not item[0], item[0])))


def short_distance(distance: Distance) -> str:
    """One word for a cell of a table."""
    return SHORT[distance]


def summary(nodes: Sequence[NumaNode], devices: Sequence[Device]) -> str:
    """``2 NUMA nodes, 4 NICs, 1 GPU``."""
    counts = [("NUMA node", len(nodes))]
    counts += [(word, sum(device.kind is kind for device in devices)) for kind, word in KINDS.items()]
    return ", ".join(f"{count} {word}{'s' if count != 1 else ''}" for word, count in counts if count)
