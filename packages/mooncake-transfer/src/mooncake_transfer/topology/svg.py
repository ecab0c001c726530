"""A topology as a drawing: a box for each node with PCI roots and devices, tables of distances below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from mooncake_transfer.topology.model import Device, DeviceKind, Distance
from mooncake_transfer.topology.wording import (
    by_root,
    device_facts,
    node_facts,
    short_distance,
    summary,
)

if TYPE_CHECKING:
    from mooncake_transfer.topology.machine import Topology

__all__ = ["render_svg"]

MARGIN, GAP = 28, 20
CHIP_W, CHIP_H, CHIP_GAP = 196, 58, 10
PAD = 14
NODE_W = 2 * PAD + 2 * 12 + 2 * CHIP_W + CHIP_GAP
NODES_A_ROW = 2
CELL_W, CELL_H = 62, 26
INK, MUTED, LINE, PAPER, NODE_FILL, ROOT_FILL = (
    "#1b2733",
    "#5f6f7f",
    "#d5dde5",
    "#ffffff",
    "#f4f7fa",
    "#ffffff",
)
KIND_COLORS = {
    DeviceKind.NIC: "#2a78d6",
    DeviceKind.RDMA: "#7a4fc9",
    DeviceKind.NVME: "#c77a12",
    DeviceKind.GPU: "#2e9e5b",
}
# From near to far: one hue that fades, so that it reads without colours too.
DISTANCE_FILLS = {
    Distance.SAME_DEVICE: ("#14532d", "#ffffff"),
    Distance.SAME_SWITCH: ("#2e9e5b", "#ffffff"),
    Distance.SAME_ROOT: ("#8fd0a9", INK),
    Distance.SAME_NODE: ("#dcefe3", INK),
    Distance.OTHER_NODE: ("#f6d9cf", INK),
    Distance.UNKNOWN: ("#eceff2", MUTED),
}


class _Drawing:
    """Shapes in the order they are painted, and the corner that they reach to."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.right = self.bottom = 0.0

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, line: str = LINE, more: str = ""
    ) -> None:
        """A rectangle; ``more``: further attributes."""
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
        self.parts.append(f'<rect {place} rx="6" fill="{fill}" stroke="{line}" {more}/>')
        self.right, self.bottom = max(self.right, x + w), max(self.bottom, y + h)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        color: str = INK,
        more: str = "",
        width: float = 0,
    ) -> None:
        """One line, cut to ``width`` pixels when that is given: letters are about 0.56 of their size wide."""
        room = int(width / (size * 0.56)) if width else len(text)
        shown = text if len(text) <= room else text[: room - 1] + "…"
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" {more}>{escape(shown)}</text>'
        )


def render_svg(topology: Topology) -> str:
    """Draw it. The document stands alone: no script, no style sheet, no font that has to be fetched."""
    drawing = _Drawing()
    drawing.text(MARGIN, MARGIN + 16, "Topology", size=20, more='font-weight="600"')
    told = summary(topology.nodes, topology.devices)
    drawing.text(MARGIN, MARGIN + 38, told, size=13, color=MUTED)
    bottom = _nodes(drawing, topology, MARGIN + 58)
    _tables(drawing, topology, bottom + GAP + 12)
    width, height = drawing.right + MARGIN, drawing.bottom + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="Inter, Segoe UI, Helvetica, Arial, sans-serif" role="img">'
        f"<title>Topology: {escape(told)}</title>"
        f'<rect width="100%" height="100%" fill="{PAPER}"/>' + "".join(drawing.parts) + "</svg>\n"
    )


def _nodes(drawing: _Drawing, topology: Topology, top: float) -> float:
    """Draw the boxes of the nodes, and one for devices that belong to none; return where they end."""
    boxes: list[tuple[str, list[str], list[Device]]] = []
    for node in topology.nodes:
        members = [each for each in topology.devices if each.numa_node == node.index]
        title = f"node {node.index}" + ("  ·  far memory" if node.is_far else "")
        boxes.append((title, node_facts(node), members))
    known = {node.index for node in topology.nodes}
    homeless = [each for each in topology.devices if each.numa_node not in known]
    if homeless:
        boxes.append(("node unknown", ["the machine does not say where these are"], homeless))
    for first in range(0, len(boxes), NODES_A_ROW):
        row = boxes[first : first + NODES_A_ROW]
        height = max(_node_height(members) for _, _, members in row)
        for at, (title, facts, members) in enumerate(row):
            x = MARGIN + at * (NODE_W + GAP)
            drawing.box(x, top, NODE_W, height, NODE_FILL)
            drawing.text(x + PAD, top + 24, title, size=15, more='font-weight="600"')
            drawing.text(x + PAD, top + 43, "  ·  ".join(facts), color=MUTED, width=NODE_W - 2 * PAD)
            _roots(drawing, members, x + PAD, top + 56)
        top += height + GAP
    return top - GAP


def _node_height(members: Sequence[Device]) -> float:
    groups = by_root(members).values()
    return 56 + sum(_root_height(group) + 10 for group in groups) + (4 if groups else 0)


def _root_height(group: Sequence[Device]) -> float:
    rows = (len(group) + 1) // 2
    return 28 + rows * CHIP_H + (rows - 1) * CHIP_GAP + 12


def _roots(drawing: _Drawing, members: Sequence[Device], x: float, top: float) -> None:
    for root, group in by_root(members).items():
        height = _root_height(group)
        drawing.box(x, top, NODE_W - 2 * PAD, height, ROOT_FILL)
        label = f"PCI root {root.removeprefix('pci')}" if root else "without PCI"
        drawing.text(x + 12, top + 19, label, size=11, color=MUTED)
        # Devices below one bridge stand side by side.
        for at, device in enumerate(sorted(group, key=lambda each: (each.path[:-1], each.path))):
            column, row = at % 2, at // 2
            left = x + 12 + column * (CHIP_W + CHIP_GAP)
            _chip(drawing, device, left, top + 28 + row * (CHIP_H + CHIP_GAP))
        top += height + 10


def _chip(drawing: _Drawing, device: Device, x: float, y: float) -> None:
    color = KIND_COLORS[device.kind]
    idle = device.state in ("down", "without driver")
    outline = 'stroke-dasharray="4 3"' if idle else ""
    drawing.box(x, y, CHIP_W, CHIP_H, PAPER, more=outline)
    drawing.parts.append(f'<rect x="{x:g}" y="{y + 6:g}" width="4" height="{CHIP_H - 12}" fill="{color}"/>')
    drawing.text(x + 13, y + 19, device.name, size=13, more='font-weight="600"', width=CHIP_W - 70)
    drawing.text(
        x + CHIP_W - 10, y + 19, device.kind.value.upper(), size=10, color=color, more='text-anchor="end"'
    )
    room = CHIP_W - 22
    drawing.text(x + 13, y + 35, ", ".join(device_facts(device)), size=11, color=MUTED, width=room)
    place = "  ".join(filter(None, (device.pci, device.model)))
    drawing.text(x + 13, y + 50, place, size=10, color=MUTED, width=room)


def _tables(drawing: _Drawing, topology: Topology, top: float) -> None:
    x: float = MARGIN
    if len(topology.nodes) > 1:
        names = [f"node {node.index}" for node in topology.nodes]
        far = max(max(node.distances) for node in topology.nodes)
        cells = [[_node_cell(value, far) for value in node.distances] for node in topology.nodes]
        x = _table(drawing, x, top, "distances of nodes", names, names, cells) + 2 * GAP
    rows = topology.of_kind(DeviceKind.NIC, DeviceKind.RDMA)
    columns = topology.of_kind(DeviceKind.GPU, DeviceKind.NVME)
    if not rows or not columns:
        return
    near = [[topology.distance(row.name, column.name) for column in columns] for row in rows]
    cells = [[(short_distance(each), *DISTANCE_FILLS[each]) for each in line] for line in near]
    names = [row.name for row in rows]
    _table(drawing, x, top, "what NICs and devices share", names, [each.name for each in columns], cells)
    y = drawing.bottom + GAP
    for at, distance in enumerate(Distance):
        left = MARGIN + at * 152
        drawing.box(left, y, 14, 14, DISTANCE_FILLS[distance][0])
        drawing.text(
            left + 20, y + 11, f"{distance.label} ({short_distance(distance)})", size=10, color=MUTED
        )
    drawing.right = max(drawing.right, MARGIN + len(Distance) * 152)


def _node_cell(value: int, far: int) -> tuple[str, str, str]:
    """A node's distance on a scale from local to the farthest."""
    share = (value - 10) / max(1, far - 10)
    steps = [DISTANCE_FILLS[Distance.SAME_ROOT], DISTANCE_FILLS[Distance.SAME_NODE], ("#fbeee9", INK)]
    fill = DISTANCE_FILLS[Distance.OTHER_NODE] if share > 0.99 else steps[min(2, int(share * 3))]
    return (str(value), *fill)


def _table(
    drawing: _Drawing,
    x: float,
    y: float,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[tuple[str, str, str]]],
) -> float:
    """Draw a table of ``(text, fill, ink)``; return its right edge."""
    drawing.text(x, y + 4, title, size=13, more='font-weight="600"')
    first = 16 + 7.2 * max(map(len, rows))
    y += 32
    for at, name in enumerate(columns):
        middle = x + first + (at + 0.5) * CELL_W
        drawing.text(middle, y - 6, name, size=11, color=MUTED, more='text-anchor="middle"', width=CELL_W)
    for line, (name, values) in enumerate(zip(rows, cells, strict=True)):
        top = y + line * CELL_H
        drawing.text(x, top + 17, name, size=11)
        for at, (text, fill, ink) in enumerate(values):
            left = x + first + at * CELL_W
            drawing.box(left + 1, top + 1, CELL_W - 2, CELL_H - 2, fill, line="none")
            drawing.text(left + CELL_W / 2, top + 17, text, size=11, color=ink, more='text-anchor="middle"')
    drawing.right = max(drawing.right, x + 7.5 * len(title))
    return max(x + first + len(columns) * CELL_W, x + 7.5 * len(title))
