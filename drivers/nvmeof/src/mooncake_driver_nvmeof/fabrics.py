"""What the kernel's initiator can do, through the program ``nvme`` (nvme-cli): discover, connect, disconnect.

It needs root, and a kernel with the module of the transport. ``namespace()`` needs neither, for tcp.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
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
LEAVING = {"deleting", "deleting (no IO)", "dead"}  # the kernel's names for what goes on its own
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

    A connection that was lost or is being given up is waited for until it is back or gone. The kernel makes
    block devices after the connection: they are waited for, each that the controllers have. Both within
    ``timeout_s``, as all the rest. Of several paths one that answers is enough. ``loss_timeout_s``: how long
    the kernel holds I/O back when the target is lost, before it fails. Raises as ``discover`` does.
    """
    deadline = time.monotonic() + timeout_s
    while (states := _states(nqn)) and LEAVING.issuperset(states.values()) and time.monotonic() < deadline:
        time.sleep(REST_S)
    if not states:
        loss = [] if transport == "loop" else [f"--ctrl-loss-tmo={loss_timeout_s}"]
        arguments = ["connect", *_place(address, port, transport), "-n", nqn, *loss]
        _nvme(arguments, max(deadline - time.monotonic(), REST_S))
    wanted = _active(nqn, deadline, timeout_s)
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


def _states(nqn: str) -> dict[Path, str]:
    """The controllers of a subsystem, which are the paths to it, and the state of each."""
    found = sorted(CONTROLLERS.glob("nvme*") if CONTROLLERS.is_dir() else ())
    return {place: _line(place / "state") for place in found if _line(place / "subsysnqn") == nqn}


def _active(nqn: str, deadline: float, timeout_s: float) -> set[int]:
    """Numbers of the namespaces that a subsystem has, as its live controllers say; waits for the first.

    The kernel still calls one live whose target has just gone: each is asked once, and what it fails with
    counts only when there is no other. Raises PeerUnreachable.
    """
    failed: dict[Path, str] = {}
    while True:
        states = _states(nqn)
        found = _asked(states, failed, deadline)
        if found is not None:
            return found
        if states and failed.keys() >= states.keys():
            raise PeerUnreachable(f"no path to {nqn} answers: {'; '.join(failed.values())}")
        if time.monotonic() > deadline:
            raise PeerUnreachable(_not_live(nqn, states, failed, timeout_s))
        time.sleep(REST_S)


def _asked(states: Mapping[Path, str], failed: dict[Path, str], deadline: float) -> set[int] | None:
    """Ask each live controller for its namespaces, but those that ``failed``; None when none has answered."""
    texts = []
    waiting = len(states.keys() - failed.keys())
    for place in (each for each, state in states.items() if state == "live" and each not in failed):
        left_s = max(deadline - time.monotonic(), REST_S)
        try:
            texts.append(_nvme(["list-ns", str(NODES / place.name)], left_s / waiting))
        except PeerUnreachable as error:
            failed[place] = str(error)
        waiting -= 1
    return {int(number, 0) for text in texts for number in NAMESPACE.findall(text)} if texts else None


def _not_live(nqn: str, states: Mapping[Path, str], failed: Mapping[Path, str], timeout_s: float) -> str:
    paths = [
        failed.get(place) or f"{place.name} to {_line(place / 'address') or 'this host'} is {state}"
        for place, state in states.items()
    ]
    return (
        f"{nqn} has no live connection after {timeout_s:g} s: {'; '.join(paths) or 'the kernel shows none'}; "
        "see that its target runs and can be reached, or disconnect it, and connect anew"
    )


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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise PeerUnreachable(f"`{' '.join(command)}` did not end within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            # Not waited for here: in a request that the target leaves open no signal reaches it.
            threading.Thread(target=_end, args=(process,), name="mooncake-nvme-end", daemon=True).start()
    if process.returncode != 0:
        said = (complaint or output).strip().replace("\n", "; ")
        raise PeerUnreachable(f"`{' '.join(command)}` failed ({process.returncode}): {said}")
    return output


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()
