"""Where an engine's devices sit, for choosing rails near the memory."""

from __future__ import annotations

from pathlib import Path

from mooncake_transfer._core import Engine as CoreEngine
from mooncake_transfer.config import TransferConfig
from mooncake_transfer.topology import Override, Topology

NODES = Path("/sys/devices/system/node")


def place_devices(core: CoreEngine, config: TransferConfig) -> dict[str, int]:
    """Tell the core the machine's NUMA distances; return the node of every device by name and by address.

    A machine with one node has nothing to tell, unless ``config.topology`` corrects it. Raises ConfigError
    for an override that cannot be read or does not fit.
    """
    override = Override.load(config.topology) if config.topology else None
    if override is None and len(list(NODES.glob("node[0-9]*"))) < 2:
        return {}
    # Without what NVIDIA's library knows of GPUs: it takes up to a second to start, and nodes are in sysfs.
    topology = Topology.discover(override=override, gpus={})
    core.set_numa_distances(topology.numa_distances())
    nodes = {}
    for device in topology.devices:
        for name in (device.name, *device.addresses):
            nodes[name] = device.numa_node
    return nodes
