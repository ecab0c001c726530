"""Runs inside the guest: the verbs driver over soft-RoCE on four NICs, beside pyverbs as another peer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyverbs_peer import PyverbsPeer

from mooncake_driver_verbs.testing import Imported
from mooncake_transfer import RemoteRegion, TransferConfig, TransferEngine, _wire
from mooncake_transfer.config import RailConfig
from mooncake_transfer.drivers import probe_drivers

MIB = 1 << 20
SIZE = 4 * MIB
SMALL = 64 << 10
DEADLINE_S = 120.0
NICS = ("lab0", "lab1", "lab2", "lab3")
# Small ones, and both of what a driver's own queue pairs must not confuse: refusals, and what goes on.
SUITE = "unaligned or closed_region or revoked_key_is"
PATTERN = bytes(range(256)) * (SIZE // 256)


def config(*numbers: int, tcp: str = "") -> TransferConfig:
    """An engine on some of the NICs; with ``tcp``, also on that address by sockets."""
    devices = ",".join(f"rxe_lab{number}" for number in numbers)
    # A timeout of 2 ** 12 * 4 us and 7 repetitions: a lost link shows within a second.
    verbs = {"devices": devices, "window_bytes": MIB, "timeout": 12, "connect_timeout_ms": 60_000}
    return TransferConfig(
        drivers=("verbs", "tcp") if tcp else ("verbs",),
        driver_options={"verbs": verbs, **({"tcp": {"host": tcp}} if tcp else {})},
        rails=RailConfig(breaker_pause_s=1.0, breaker_max_pause_s=2.0, probe_every=20),
        connect_timeout_s=60,
        transfer_timeout_s=DEADLINE_S,
    )


def sent() -> dict[str, int]:
    """Bytes that each NIC has sent."""
    return {nic: int(Path(f"/sys/class/net/{nic}/statistics/tx_bytes").read_text()) for nic in NICS}


def since(before: dict[str, int]) -> dict[str, int]:
    """Bytes that each NIC has sent since then."""
    return {nic: count - before[nic] for nic, count in sent().items()}


def run(*command: str) -> None:
    """Run a program to its good end."""
    subprocess.run(command, check=True, timeout=60, capture_output=True)


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, for a bounded time."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(what)
        time.sleep(0.01)


def with_pyverbs() -> dict[str, Any]:
    """Another implementation reads and writes our region, and is refused with a wrong key."""
    with TransferEngine(config(0)) as engine:
        region = engine.allocate(SMALL)
        region.view()[:] = PATTERN[:SMALL]
        (address,) = [blob for name, _, blob in engine._core.addresses() if name == "verbs"]
        found = msgspec.msgpack.decode(region.descriptor(), type=_wire.Descriptor)
        readable = msgspec.msgpack.decode(region.grant("r"), type=_wire.Descriptor)
        report: dict[str, Any] = {}
        peer = PyverbsPeer("rxe_lab1", address, SMALL)
        told = peer.control.import_key(found.region_id, found.key)
        status, received = peer.read(told, SMALL)
        report["read"] = [status, received == PATTERN[:SMALL]]
        report["write"] = [peer.write(told, b"from pyverbs"), bytes(region.view()[:12]) == b"from pyverbs"]
        report["wrong_rkey"] = peer.write(told, b"wrong", rkey=told.rkeys[0] ^ 0x5500)
        peer.close()
        peer = PyverbsPeer("rxe_lab1", address, SMALL)
        lesser: Imported = peer.control.import_key(readable.region_id, readable.key)
        report["read_only"] = [lesser.access, peer.write(lesser, b"wrong")]
        peer.close()
        report["untouched"] = bytes(region.view()[:12]) == b"from pyverbs"
    return report


def over_four_nics() -> dict[str, Any]:
    """Two NICs send and two receive: all of a transfer, with losses, without a link, without any."""
    report: dict[str, Any] = {}
    with (
        TransferEngine(config(2, 3, tcp="127.0.0.1")) as owner,
        TransferEngine(config(0, 1, tcp="127.0.0.1")) as user,
    ):
        target, source = owner.allocate(SIZE, prefault=True), user.allocate(SIZE, prefault=True)
        remote = user.import_region(target.descriptor(), timeout_s=60)
        source.view()[:] = PATTERN

        def move() -> dict[str, int]:
            target.view()[:] = bytes(SIZE)
            before = sent()
            user.write(source, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
            assert bytes(target.view()) == PATTERN
            return since(before)

        report["whole"] = move()
        report["back"] = read_back(user, remote)
        run("tc", "qdisc", "add", "dev", "lab0", "root", "netem", "loss", "1%")
        report["lossy"] = move()
        run("tc", "qdisc", "del", "dev", "lab0", "root")
        transfer = user.write(source, remote, [[0, 0, SIZE]] * 2)
        wait_for("the transfer does not begin", lambda: transfer.bytes_done > SIZE // 4)
        run("ip", "link", "set", "lab1", "down")
        transfer.wait(DEADLINE_S)
        report["without_lab1"] = move()
        transfer = user.write(source, remote, [[0, 0, SIZE]] * 2)
        wait_for("the transfer does not begin", lambda: transfer.bytes_done > SIZE // 4)
        run("ip", "link", "set", "lab0", "down")
        transfer.wait(DEADLINE_S)
        report["without_any"] = move()
        report["rails"] = [[rail.driver, rail.device, rail.bytes, rail.errors] for rail in user.rails()]
    return report


def read_back(user: TransferEngine, remote: RemoteRegion) -> bool:
    """Read what was written, into other memory."""
    place = user.allocate(SIZE)
    user.read(place, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
    equal = bytes(place.view()) == PATTERN
    place.close()
    return equal


def main() -> None:
    """Write one JSON document to standard output."""
    (verbs,) = [status for status in probe_drivers() if status.name == "verbs"]
    report: dict[str, Any] = {"devices": verbs.devices, "reason": verbs.reason}
    report["pyverbs"] = with_pyverbs()
    report["nics"] = over_four_nics()
    suite = str(Path(__file__).with_name("inside_verbs_suite.py"))
    # Its words go to standard error: standard output is the report.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
        "-k",
        SUITE,
        suite,
    ]
    done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=300)
    report["suite"] = done.returncode == pytest.ExitCode.OK
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
