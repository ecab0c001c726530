"""Runs inside the guest: two engines, two NICs each; a link goes down in mid-transfer and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mooncake_transfer import Region, RemoteRegion, TransferConfig, TransferEngine
from mooncake_transfer.config import RailConfig

MIB = 1 << 20
SIZE = 16 * MIB
DEADLINE_S = 200.0
NICS = ("lab0", "lab1", "lab2", "lab3")
VICTIM = "lab1"


def config(first: int) -> TransferConfig:
    """An engine on the addresses of two NICs; the channel stays on lo, out of the counters."""
    hosts = f"10.78.0.{first},10.78.0.{first + 1}"
    return TransferConfig(
        drivers=("tcp",),
        driver_options={"tcp": {"hosts": hosts, "dead_peer_timeout_ms": 2000}},
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


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, for a bounded time."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(what)
        time.sleep(0.01)


class Link:
    """Takes a NIC's link down and up; its routes, which the kernel then forgets, come back with it."""

    def __init__(self, name: str):
        self.name = name
        self.table = str(100 + int(name.removeprefix("lab")))
        self.routes = self._ip("route", "show", "table", self.table).splitlines()

    def down(self) -> None:
        """Lose the link."""
        self._ip("link", "set", self.name, "down")

    def up(self) -> None:
        """Get it back."""
        self._ip("link", "set", self.name, "up")
        for route in self.routes:
            self._ip("route", "replace", *route.split(), "table", self.table)

    @staticmethod
    def _ip(*words: str) -> str:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout


def main() -> None:
    """Write one JSON document to standard output."""
    report: dict[str, object] = {}
    with TransferEngine(config(3)) as owner, TransferEngine(config(1)) as user:
        target, source = owner.allocate(SIZE, prefault=True), user.allocate(SIZE, prefault=True)
        remote = user.import_region(target.descriptor(), timeout_s=60)
        pattern = bytes(range(256)) * (SIZE // 256)
        source.view()[:] = pattern
        before = sent()
        user.write(source, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
        report["whole"] = since(before)
        report["arrived"] = bytes(target.view()) == pattern
        report["link"] = lose_the_link(user, source, remote, Link(VICTIM))
        report["arrived_again"] = bytes(target.view()) == pattern
        report["rails"] = [
            [rail.device, rail.remote_device, rail.bytes, rail.errors] for rail in user.rails()
        ]
    json.dump(report, sys.stdout)


def lose_the_link(
    user: TransferEngine, source: Region, remote: RemoteRegion, link: Link
) -> dict[str, object]:
    """Keep writing; take the link down in the middle of it, and up again when the others have gone on."""
    rounds = 8
    transfer = user.write(source, remote, [[0, 0, SIZE]] * rounds)
    wait_for("the transfer does not begin", lambda: transfer.bytes_done > SIZE // 2)
    link.down()
    done_at_loss, before = transfer.bytes_done, sent()
    wait_for("nothing moves without the link", lambda: transfer.bytes_done > done_at_loss + 2 * SIZE)
    without, done_at_return = since(before), transfer.bytes_done
    link.up()
    returning = sent()
    transfer.wait(DEADLINE_S)

    def used_again() -> bool:
        # The rail's breaker may be open for a while; more traffic finds out when it is not.
        user.write(source, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
        return since(returning)[link.name] > MIB

    wait_for("the link is not used again", used_again)
    return {
        "done_at_loss": done_at_loss,
        "done_at_return": done_at_return,
        "total": rounds * SIZE,
        "without": without,
        "returned": since(returning)[link.name],
    }


if __name__ == "__main__":
    main()
