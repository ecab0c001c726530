"""A machine's topology: discovered, corrected, asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.topology.addresses import interface_addresses
from mooncake_transfer.topology.devices import read_devices
from mooncake_transfer.topology.model import Device, DeviceKind, Distance, NumaNode, pci_distance
from mooncake_transfer.topology.nodes import read_nodes
from mooncake_transfer.topology.nvml import GpuInfo, ask_nvml
from mooncake_transfer.topology.override import DistanceOverride, Override
from mooncake_transfer.topology.sysfs import Tree, natural_order

__all__ = ["Topology"]

HERE = Path("/")
LOCAL, REMOTE = 10, 20  # the kernel's LOCAL_DISTANCE and REMOTE_DISTANCE
UNREACHED = 255  # what the kernel's tables hold for nodes without a way between them
Place = str | int
"""A device by its name, or a NUMA node by its number."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """What lies where in a machine. Never changes; discover it again after hot-plug.

    Attributes:
        nodes: its NUMA nodes.
        devices: NICs, RDMA devices, NVMe drives, GPUs.
        notes: what could not be read, and what of an override did not fit.
        corrected: distances that an override sets.
    """

    nodes: tuple[NumaNode, ...]
    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()
    corrected: tuple[DistanceOverride, ...] = ()

    @classmethod
    def discover(
        cls,
        root: str | Path = HERE,
        *,
        override: Override | None = None,
        addresses: Mapping[str, Sequence[str]] | None = None,
        gpus: Mapping[str, GpuInfo] | None = None,
    ) -> Topology:
        """Look at the machine whose ``sys`` and ``proc`` lie below ``root``. Changes nothing.

        ``addresses`` of each NIC and what is known of ``gpus`` by their PCI address: by default this machine
        is asked when ``root`` is its own. What is missing or forbidden is left out; ``notes`` has the latter.
        Raises ConfigError when an override's ``numa_distances`` do not fit the nodes.
        """
        tree = Tree(root)
        if tree.root == HERE:
            addresses = interface_addresses() if addresses is None else addresses
            gpus = ask_nvml() if gpus is None else gpus
        nodes = tuple(read_nodes(tree))
        devices = tuple(read_devices(tree, addresses or {}, gpus or {}))
        if len(nodes) == 1:  # a machine without NUMA says -1 for all, and everything is on its one node
            devices = tuple(msgspec.structs.replace(each, numa_node=nodes[0].index) for each in devices)
        found = cls(nodes=nodes, devices=devices, notes=tuple(tree.notes))
        return found.corrected_by(override) if override else found

    def corrected_by(self, override: Override) -> Topology:
        """Return the topology with an override's corrections. Raises ConfigError, see ``discover``."""
        known = {device.name for device in self.devices}
        ends = {end for fixed in override.distances for end in fixed.between}
        named = {*override.hide, *override.nodes, *ends}
        absent = sorted(name for name in named - known if not name.startswith("node:"))
        notes = [f"the override names {name!r}, which is not here" for name in absent]
        nodes = self.nodes
        if override.numa_distances:
            if len(override.numa_distances) != len(nodes):
                raise ConfigError(
                    f"numa_distances of the override has {len(override.numa_distances)} rows, "
                    f"this machine {len(nodes)} nodes"
                )
            rows = zip(nodes, override.numa_distances, strict=True)
            nodes = tuple(msgspec.structs.replace(node, distances=row) for node, row in rows)
        devices = tuple(
            msgspec.structs.replace(each, numa_node=override.nodes.get(each.name, each.numa_node))
            for each in self.devices
            if each.name not in override.hide
        )
        return Topology(
            nodes=nodes,
            devices=devices,
            notes=(*self.notes, *notes),
            corrected=(*self.corrected, *override.distances),
        )

    def device(self, name: str) -> Device:
        """Return a device. Raises ConfigError, which names those that there are."""
        for device in self.devices:
            if device.name == name:
                return device
        known = ", ".join(device.name for device in self.devices) or "none"
        raise ConfigError(f"there is no device {name!r}; known: {known}")

    def of_kind(self, *kinds: DeviceKind) -> list[Device]:
        """Return the devices of these kinds, one kind after the other."""
        return [device for kind in kinds for device in self.devices if device.kind is kind]

    def distance(self, one: Place, other: Place) -> Distance:
        """How far two places are: by an override, else in the PCI tree, else by their nodes.

        Raises ConfigError for a device that is not there.
        """
        ends = {_end(one), _end(other)}
        for fixed in reversed(self.corrected):
            if set(fixed.between) == ends:
                return fixed.value
        if isinstance(one, str) and isinstance(other, str):
            found = pci_distance(self.device(one), self.device(other))
            if found is not Distance.UNKNOWN:
                return found
        here, there = self._node_of(one), self._node_of(other)
        if here < 0 or there < 0:
            return Distance.UNKNOWN
        return Distance.SAME_NODE if here == there else Distance.OTHER_NODE

    def rank(self, target: Place, candidates: Iterable[str] | None = None) -> list[Device]:
        """Return ``candidates`` (default: all NICs), the best for data at ``target`` first.

        The nearest first, among these by the distance of the nodes, then the faster, then by name; those that
        are down come last. Raises ConfigError for a device that is not there.
        """
        names = candidates if candidates is not None else [nic.name for nic in self.of_kind(DeviceKind.NIC)]
        home = self._node_of(target)

        def order(device: Device) -> tuple[object, ...]:
            return (
                device.state == "down",
                self.distance(target, device.name),
                self.numa_distance(home, device.numa_node),
                -device.bandwidth_bytes_per_s,
                natural_order(device.name),
            )

        return sorted((self.device(name) for name in names), key=order)

    def numa_distance(self, one: int, other: int) -> int:
        """The kernel's distance between two nodes: 10 is local; 255 when one of them is not known."""
        places = {node.index: at for at, node in enumerate(self.nodes)}
        if one not in places or other not in places:
            return UNREACHED
        return self.nodes[places[one]].distances[places[other]]

    def numa_distances(self) -> list[list[int]]:
        """The distances as a square matrix, rows and columns by node number.

        Numbers without a node, which the kernel allows, have 10 to themselves and 255 to all others.
        """
        size = max((node.index for node in self.nodes), default=-1) + 1
        known = {node.index for node in self.nodes}
        return [
            [
                self.numa_distance(row, column)
                if row in known and column in known
                else LOCAL
                if row == column
                else UNREACHED
                for column in range(size)
            ]
            for row in range(size)
        ]

    def to_json(self) -> str:
        """Everything as JSON: ``nodes``, ``devices``, ``notes``, ``numa_distances``, and ``distances``.

        ``distances`` has for each NIC and RDMA device those to every other device and node (``node:0``).
        """
        places: list[Place] = [each.name for each in self.devices]
        places += [node.index for node in self.nodes]
        near = {
            nic.name: {
                _end(place): self.distance(nic.name, place).label for place in places if place != nic.name
            }
            for nic in self.of_kind(DeviceKind.NIC, DeviceKind.RDMA)
        }
        content = {
            "nodes": self.nodes,
            "devices": self.devices,
            "notes": self.notes,
            "numa_distances": self.numa_distances(),
            "distances": near,
        }
        return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()

    def render_text(self) -> str:
        """A tree of nodes, PCI roots and devices, for a terminal."""
        from mooncake_transfer.topology.text import render_text

        return render_text(self)

    def render_svg(self) -> str:
        """A drawing of the same with tables of the distances, as an SVG document."""
        from mooncake_transfer.topology.svg import render_svg

        return render_svg(self)

    def _node_of(self, place: Place) -> int:
        return place if isinstance(place, int) else self.device(place).numa_node


def _end(place: Place) -> str:
    return f"node:{place}" if isinstance(place, int) else place
