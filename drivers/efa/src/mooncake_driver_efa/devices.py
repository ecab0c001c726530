"""The EFA devices of this machine, as sysfs has them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EfaDevice", "efa_devices"]

SYS_INFINIBAND = Path("/sys/class/infiniband")
AMAZON = "0x1d0f"


@dataclass(frozen=True, slots=True)
class EfaDevice:
    """One NIC: its name, and the NUMA node it sits at (-1 when unknown)."""

    name: str
    numa_node: int


def efa_devices() -> list[EfaDevice]:
    """Return every RDMA device of Amazon's, by name. Raises nothing: what cannot be read is not there."""
    found = []
    with suppress(OSError):
        for folder in sorted(SYS_INFINIBAND.iterdir()):
            if _text(folder / "device" / "vendor") == AMAZON:
                found.append(EfaDevice(folder.name, int(_text(folder / "device" / "numa_node") or -1)))
    return found


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
