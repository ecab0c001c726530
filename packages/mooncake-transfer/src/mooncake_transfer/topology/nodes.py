"""NUMA nodes from sysfs: CPUs, memory, distances, and what the firmware says of their speed."""

from __future__ import annotations

from mooncake_transfer.topology.model import NumaNode
from mooncake_transfer.topology.sysfs import Tree

__all__ = ["read_nodes"]

NODES = "sys/devices/system/node"
TIERS = "sys/devices/virtual/memory_tiering"


def read_nodes(tree: Tree) -> list[NumaNode]:
    """Return the machine's nodes; one with all CPUs and all memory where the kernel knows no NUMA."""
    names = [name for name in tree.names(NODES) if name.startswith("node") and name[4:].isdigit()]
    if not names:
        memory = _meminfo_bytes(tree.text("proc/meminfo"))
        cpus = tuple(tree.numbers("sys/devices/system/cpu/online"))
        return [NumaNode(index=0, cpus=cpus, memory_bytes=memory, distances=(10,))]
    tiers = _tiers(tree)
    return [_read_node(tree, name, len(names), at, tiers) for at, name in enumerate(names)]


def _read_node(tree: Tree, name: str, count: int, at: int, tiers: dict[int, int]) -> NumaNode:
    folder, index = f"{NODES}/{name}", int(name[4:])
    distances = [int(word) for word in tree.text(f"{folder}/distance").split() if word.isdigit()]
    if len(distances) != count:
        # The kernel's own default: 10 to oneself, 20 to any other.
        distances = [10 if other == at else 20 for other in range(count)]
    speed = f"{folder}/access0/initiators"
    return NumaNode(
        index=index,
        cpus=tuple(tree.numbers(f"{folder}/cpulist")),
        memory_bytes=_meminfo_bytes(tree.text(f"{folder}/meminfo")),
        distances=tuple(distances),
        tier=tiers.get(index, -1),
        read_latency_ns=tree.number(f"{speed}/read_latency"),
        write_latency_ns=tree.number(f"{speed}/write_latency"),
        # The kernel counts in MiB/s: Documentation/admin-guide/mm/numaperf.rst.
        read_bandwidth_bytes_per_s=tree.number(f"{speed}/read_bandwidth") << 20,
        write_bandwidth_bytes_per_s=tree.number(f"{speed}/write_bandwidth") << 20,
    )


def _meminfo_bytes(text: str) -> int:
    """The MemTotal of /proc/meminfo or of a node's meminfo, whose lines begin with ``Node N``."""
    for line in text.splitlines():
        words = line.split()
        if "MemTotal:" in words[:3]:
            return int(words[words.index("MemTotal:") + 1]) * 1024
    return 0


def _tiers(tree: Tree) -> dict[int, int]:
    found = {}
    for name in tree.names(TIERS):
        if name.startswith("memory_tier") and name[11:].isdigit():
            for node in tree.numbers(f"{TIERS}/{name}/nodelist"):
                found[node] = int(name[11:])
    return found
