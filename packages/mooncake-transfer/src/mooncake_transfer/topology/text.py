"""A topology as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mooncake_transfer.topology.model import Device, DeviceKind
from mooncake_transfer.topology.wording import by_root, device_facts, node_facts, short_distance, summary

if TYPE_CHECKING:
    from mooncake_transfer.topology.machine import Topology

__all__ = ["render_text"]


def render_text(topology: Topology) -> str:
    """Nodes with their devices, then the tables of distances. Lines end without blanks."""
    lines = [summary(topology.nodes, topology.devices)]
    for node in topology.nodes:
        lines += ["", f"node {node.index}: {', '.join(node_facts(node))}"]
        lines += _devices([each for each in topology.devices if each.numa_node == node.index])
    known = {node.index for node in topology.nodes}
    homeless = [each for each in topology.devices if each.numa_node not in known]
    if homeless:
        lines += ["", "node unknown", *_devices(homeless)]
    if len(topology.nodes) > 1:
        names = [f"node {node.index}" for node in topology.nodes]
        cells = [list(map(str, node.distances)) for node in topology.nodes]
        lines += ["", "distances of nodes", *_table(names, names, cells)]
    lines += _affinities(topology)
    lines += ["", *(f"note: {note}" for note in topology.notes)] if topology.notes else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _devices(devices: Sequence[Device]) -> Iterator[str]:
    for root, members in by_root(devices).items():
        yield f"  {root or 'without PCI'}"
        for device in members:
            facts = ", ".join(device_facts(device))
            yield f"    {device.kind.value:<5}{device.name:<12} {device.pci:<13} {facts}  {device.model}"


def _affinities(topology: Topology) -> list[str]:
    rows = topology.of_kind(DeviceKind.NIC, DeviceKind.RDMA)
    columns = topology.of_kind(DeviceKind.GPU, DeviceKind.NVME)
    if not rows or not columns:
        return []
    cells = [[short_distance(topology.distance(row.name, column.name)) for column in columns] for row in rows]
    table = _table([row.name for row in rows], [column.name for column in columns], cells)
    return ["", "what NICs and devices share", *table]


def _table(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    first = max(map(len, rows))
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(columns)]
    for name, line in (("", columns), *zip(rows, cells, strict=True)):
        padded = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
        yield f"  {name:<{first}}  " + "  ".join(padded)
