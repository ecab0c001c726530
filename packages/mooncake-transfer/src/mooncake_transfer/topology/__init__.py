"""What lies where in a machine: NUMA nodes, NICs, drives, GPUs, and how far they are from one another."""

from mooncake_transfer.topology.machine import Topology
from mooncake_transfer.topology.model import Device, DeviceKind, Distance, NumaNode
from mooncake_transfer.topology.override import Override

__all__ = ["Device", "DeviceKind", "Distance", "NumaNode", "Override", "Topology"]
