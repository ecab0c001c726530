"""Runs inside the guest: the efa driver over libfabric's verbs;ofi_rxm, on soft-RoCE."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from inside_efa_suite import DOMAIN, OPTIONS

from mooncake_transfer import TransferConfig, TransferEngine, _wire
from mooncake_transfer.drivers import probe_drivers
from mooncake_transfer.errors import RegionRefused
from mooncake_transfer.testing.fixtures import wait_until
from mooncake_transfer.testing.owner import NOTICE_METHOD, RegionOwner
from mooncake_transfer.testing.pattern import digest, pattern

SIZE = 4 << 20
DEADLINE_S = 120.0
COUNTERS = Path("/sys/class/infiniband", DOMAIN, "ports/1/hw_counters")


def packets() -> int:
    """How many packets the device has sent."""
    return int((COUNTERS / "sent_pkts").read_text())


def probed() -> bool:
    """Whether the driver's probe has found libfabric."""
    return any(status.name == "efa" and status.usable for status in probe_drivers())


def config() -> TransferConfig:
    """An engine that has nothing but the driver over verbs."""
    return TransferConfig(
        drivers=("efa",),
        driver_options={"efa": OPTIONS},
        connect_timeout_s=60,
        transfer_timeout_s=DEADLINE_S,
    )


def between_two_engines() -> dict[str, Any]:
    """Bytes there and back, a notification behind them, and a key that is wrong by one bit."""
    report: dict[str, Any] = {}
    with TransferEngine(config()) as owner, TransferEngine(config()) as user:
        target = RegionOwner(owner)
        target.listen()
        owned = target.allocate(SIZE, 1)
        remote = user.import_region(owned.descriptor, timeout_s=60)
        local = user.allocate(SIZE)
        before = packets()
        user.read(local, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
        report["read"] = bytes(local.view()) == pattern(1, SIZE).tobytes()
        local.view()[:] = pattern(2, SIZE).tobytes()
        user.write(local, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
        report["written"] = target.digest(owned.number) == digest(pattern(2, SIZE))
        report["packets"] = packets() - before

        def carried() -> bool:
            told = (NOTICE_METHOD, b"%d:told" % owned.number)
            user.write(local, remote, [[0, 0, SIZE]], notify=told).wait(DEADLINE_S)
            return sum(row["notices_sent"] for row in user.stats().values()) > 0

        wait_until(carried, "the driver carries notifications", DEADLINE_S)
        wait_until(lambda: bool(target.told()), "a notification comes", DEADLINE_S)
        report["told"] = target.told()[-1] == (f"{owned.number}:told", digest(pattern(2, SIZE)))
        found = msgspec.msgpack.decode(owned.descriptor, type=_wire.Descriptor)
        key = bytes([found.key[0] ^ 1]) + found.key[1:]
        forged = user.import_region(msgspec.msgpack.encode(msgspec.structs.replace(found, key=key)))
        try:
            user.write(local, forged, [[0, 0, 4096]]).wait(DEADLINE_S)
        except RegionRefused as refusal:
            report["refused"] = str(refusal)
        target.clear()
    return report


def main() -> None:
    """Write one JSON document to standard output."""
    command = ["fi_info", "-p", "verbs;ofi_rxm", "-d", DOMAIN]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    sys.stderr.write(listed.stdout + listed.stderr)
    # The first probe reads every library over 9p, for longer than an engine waits.
    wait_until(probed, "the driver's probe answers in time", DEADLINE_S)
    report: dict[str, Any] = {"listed": DOMAIN in listed.stdout} | between_two_engines()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
