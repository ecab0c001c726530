"""What the kernel's initiator can do, through the program ``nvme`` (nvme-cli): discover, connect, disconnect.

It needs root, and a kernel with the module of the transport. ``namespace()`` needs neither, for tcp.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_transfer.errors import ConfigError, DriverUnavailable, PeerUnreachable

__all__ = ["BlockNamespace", "Subsystem", "block_namespaces", "connect", "disconnect", "discover"]

PROGRAM = "nvme"
DEVICES = Path("/sys/block")
TRANSPORTS = ("tcp", "rdma", "loop", "fc")


@dataclass(frozen=True, slots=True)
class Subsystem:
    """An entry of a discovery log.

    Attributes:
        nqn: its name.
        transport: ``tcp``, ``rdma``, ``loop`` or ``fc``.
        address: where it listens.
        service: its port.
    """

    nqn: str
    transport: str
    address: str
    service: str


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """A namespace that the kernel has as a block device.

    Attributes:
        device: its path, for ``FileSource``.
        subsystem: name of the subsystem it belongs to.
        nsid: its number there.
        uuid: its UUID in hexadecimal; empty when it has none.
        nguid: its NGUID, likewise.
        nbytes: its size in bytes.
    """

    device: Path
    subsystem: str
    nsid: int
    uuid: str
    nguid: str
    nbytes: int


def discover(
    address: str, *, port: int = 4420, transport: str = "tcp", timeout_s: float = 30.0
) -> list[Subsystem]:
    """Ask the discovery service at ``address`` for its subsystems.

    Raises DriverUnavailable without nvme-cli, PeerUnreachable with what it said, or at the deadline.
    """
    log = json.loads(_nvme(["discover", *_place(address, port, transport), "-o", "json"], timeout_s) or "{}")
    records: list[dict[str, Any]] = log.get("records", [])
    return [
        Subsystem(
            str(each.get("subnqn", "")),
            str(each.get("trtype", "")),
            str(each.get("traddr", "")),
            str(each.get("trsvcid", "")).strip(),
        )
        for each in records
    ]


def connect(
    nqn: str,
    address: str = "",
    *,
    port: int = 4420,
    transport: str = "tcp",
    loss_timeout_s: int = 600,
    timeout_s: float = 30.0,
) -> list[BlockNamespace]:
    """Have the kernel connect to a subsystem, and return its namespaces; connecting twice is no error.

    ``loss_timeout_s``: how long the kernel holds I/O back when the target is lost, before it fails. Raises as
    ``discover`` does.
    """
    if not _of(nqn):
        loss = [] if transport == "loop" else [f"--ctrl-loss-tmo={loss_timeout_s}"]
        _nvme(["connect", *_place(address, port, transport), "-n", nqn, *loss], timeout_s)
    return _of(nqn)


def disconnect(nqn: str, *, timeout_s: float = 30.0) -> None:
    """Have the kernel give up every connection to a subsystem. Raises as ``discover`` does."""
    _nvme(["disconnect", "-n", nqn], timeout_s)


def block_namespaces() -> list[BlockNamespace]:
    """Every NVMe namespace that the kernel has as a block device, of local drives too."""
    found = []
    for place in sorted(DEVICES.glob("nvme*n*") if DEVICES.is_dir() else ()):
        name = _line(place / "device/subsysnqn")
        if not name or not _line(place / "nsid").isdigit():  # a path below a multipath device
            continue
        found.append(
            BlockNamespace(
                Path("/dev") / place.name,
                name,
                int(_line(place / "nsid")),
                _line(place / "uuid").replace("-", ""),
                _line(place / "nguid").replace("-", ""),
                int(_line(place / "size") or 0) * 512,
            )
        )
    return found


def _of(nqn: str) -> list[BlockNamespace]:
    return [each for each in block_namespaces() if each.subsystem == nqn]


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # namespaces differ in what they have
        return ""


def _place(address: str, port: int, transport: str) -> list[str]:
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport is {transport!r}; it must be one of {', '.join(TRANSPORTS)}")
    return ["-t", transport] + ([] if transport == "loop" else ["-a", address, "-s", str(port)])


def _nvme(arguments: Sequence[str], timeout_s: float) -> str:
    program = shutil.which(PROGRAM)
    if program is None:
        raise DriverUnavailable("the program nvme is not installed (Debian: apt-get install nvme-cli)")
    command = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise PeerUnreachable(f"`{' '.join(command)}` did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise PeerUnreachable(f"`{' '.join(command)}` failed ({done.returncode}): {said}")
    return done.stdout
