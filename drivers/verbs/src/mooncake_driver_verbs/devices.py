"""RDMA devices of this machine, from sysfs: their ports, whether those are up, and where the device sits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SYSFS", "Port", "ports", "reason_for_none"]

SYSFS = Path("/sys/class/infiniband")
DEV = Path("/dev/infiniband")
MODULES = Path("/sys/module")


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one device.

    Attributes:
        device: as the kernel names it (``mlx5_0``).
        number: from 1 on.
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED`` or what else the kernel says.
        link: ``InfiniBand`` or ``Ethernet``.
        rate: as the kernel writes it (``400 Gb/sec (4X NDR)``).
        interfaces: network interfaces that its addresses belong to.
        numa_node: of the device, -1 when unknown.
    """

    device: str
    number: int
    state: str
    link: str
    rate: str
    interfaces: tuple[str, ...]
    numa_node: int

    @property
    def active(self) -> bool:
        """Whether it can carry anything."""
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        on = f" on {', '.join(self.interfaces)}" if self.interfaces else ""
        return f"{self.device}:{self.number} {self.link} {self.rate}{on}"


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _interfaces(port: Path) -> tuple[str, ...]:
    found: list[str] = []
    with suppress(OSError):
        for entry in sorted((port / "gid_attrs" / "ndevs").iterdir()):
            name = _text(entry)  # entries without an address cannot be read
            if name and name not in found:
                found.append(name)
    return tuple(found)


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """Return every port of every device, in the order of their names. Never raises."""
    found = []
    with suppress(OSError):
        for device in sorted(sysfs.iterdir()):
            node = _text(device / "device" / "numa_node")
            for port in sorted((device / "ports").iterdir(), key=lambda path: int(path.name)):
                found.append(
                    Port(
                        device.name,
                        int(port.name),
                        _text(port / "state").partition(": ")[2],
                        _text(port / "link_layer"),
                        _text(port / "rate"),
                        _interfaces(port),
                        int(node) if node.lstrip("-").isdigit() else -1,
                    )
                )
    return found


def reason_for_none(sysfs: Path = SYSFS, dev: Path = DEV, modules: Path = MODULES) -> str | None:
    """Say why no port can be used and what would help; None when one can."""
    known = ports(sysfs)
    if not known:
        if not (modules / "ib_core").exists():
            return (
                "this kernel has no RDMA: the module ib_core is not loaded; load the module of the NIC "
                "(mlx5_ib, irdma, bnxt_re, erdma; rdma_rxe for any Ethernet interface)"
            )
        return f"there is no RDMA device in {sysfs}; load the module of the NIC, or `rdma link add` for rxe"
    down = [f"{port.device}:{port.number} is {port.state or 'unreadable'}" for port in known]
    if not any(port.active for port in known):
        return f"no port is active ({', '.join(down)}); connect it and set its network interface up"
    if not any(dev.glob("uverbs*")):
        return (
            f"no {dev}/uverbs* for the devices ({', '.join(sorted({port.device for port in known}))}); load "
            "the module ib_uverbs, or pass /dev/infiniband into the container"
        )
    return None
