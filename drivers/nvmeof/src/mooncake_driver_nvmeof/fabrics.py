"""What the kernel's initiator can do, through the program ``nvme`` (nvme-cli): discover, connect, disconnect.

It needs root, and a kernel with the module of the transport. ``namespace()`` needs neither, for tcp.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_transfer.errors import ConfigError, DriverUnavailable, PeerUnreachable

__all__ = ["BlockNamespace", "Subsystem", "block_namespaces", "connect", "disconnect", "discover"]

PROGRAM = "nvme"
DEVICES = Path("/sys/block")
CONTROLLERS = Path("/sys/class/nvme")
NODES = Path("/dev")
NAMESPACE = re.compile(r"^\[\s*\d+\]:(\w+)", re.MULTILINE)  # a line of `nvme list-ns`: [   0]:0x1
REST_S = 0.05
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

    The kernel makes their block devices after the connection: they are waited for, each that the controller
    has, within ``timeout_s`` as all the rest. ``loss_timeout_s``: how long the kernel holds I/O back when the
    target is lost, before it fails. Raises as ``discover`` does.
    """
    deadline = time.monotonic() + timeout_s
    if not _controllers(nqn):
        loss = [] if transport == "loop" else [f"--ctrl-loss-tmo={loss_timeout_s}"]
        _nvme(["connect", *_place(address, port, transport), "-n", nqn, *loss], timeout_s)
    wanted = _active(nqn, deadline)
    while missing := wanted - {each.nsid for each in _of(nqn)}:
        if time.monotonic() > deadline:
            numbers = ", ".join(map(str, sorted(missing)))
            raise PeerUnreachable(
                f"{nqn} is connected, but the kernel has no block device of its namespaces {numbers} after "
                f"{timeout_s:g} s; `dmesg` says why, or disconnect it"
            )
        time.sleep(REST_S)
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
                NODES / place.name,
                name,
                int(_line(place / "nsid")),
                _line(place / "uuid").replace("-", ""),
                _line(place / "nguid").replace("-", ""),
                int(_line(place / "size") or 0) * 512,
            )
        )
    return found


def _of(nqn: str) -> list[BlockNamespace]:
    # The kernel shows a device in sysfs a moment before its node is there to be opened.
    return [each for each in block_namespaces() if each.subsystem == nqn and each.device.exists()]


def _controllers(nqn: str) -> list[Path]:
    found = sorted(CONTROLLERS.glob("nvme*") if CONTROLLERS.is_dir() else ())
    return [place for place in found if _line(place / "subsysnqn") == nqn]


def _active(nqn: str, deadline: float) -> set[int]:
    """Numbers of the namespaces that a subsystem has, as its controllers say that can be asked now."""
    text = ""
    for place in _controllers(nqn):
        if _line(place / "state") == "live":
            left_s = max(deadline - time.monotonic(), REST_S)
            text += _nvme(["list-ns", str(NODES / place.name)], left_s)
    return {int(number, 0) for number in NAMESPACE.findall(text)}


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
