"""Runs inside the guest: the verbs driver over soft-RoCE on eight NICs, beside pyverbs as another peer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from inside_doctor import ask_doctor
from inside_rails import Link
from pyverbs_peer import PyverbsPeer, find_pyverbs

from mooncake_driver_verbs import plugin
from mooncake_driver_verbs.testing import NOTICE_BYTES, Imported
from mooncake_transfer import TransferConfig, TransferEngine, _wire
from mooncake_transfer.config import RailConfig
from mooncake_transfer.drivers import probe_drivers

MIB = 1 << 20
SIZE = 8 * MIB
SMALL = 64 << 10
ROUNDS = 8  # of a transfer that shall be under way for a while
DEADLINE_S = 120.0
NICS = tuple(f"lab{number}" for number in range(8))
SENDERS = NICS[:4]
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


def dropped(nic: str) -> int:
    """How many packets netem has dropped there."""
    command = ["tc", "-s", "qdisc", "show", "dev", nic]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    return sum(int(count) for count in re.findall(r"dropped (\d+)", done.stdout))


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


def send_notices(owner: TransferEngine) -> list[int]:
    """An older peer's notice and a newer one's come to the engine, which knows neither sender."""
    address = next(blob for name, _, blob in owner._core.addresses() if name == "verbs")
    peer = PyverbsPeer("rxe_lab0", address, SMALL)

    def dropped() -> int:
        return sum(row["notices_dropped"] for row in owner.stats().values())

    statuses = [peer.send(b"m" * 100), peer.notify(1, b"w" * NOTICE_BYTES)]
    wait_for("the notices do not come", lambda: dropped() == len(statuses))
    peer.close()
    return statuses


class Mover:
    """Writes the pattern from one engine to another, and tells what each NIC has sent for it."""

    def __init__(self, owner: TransferEngine, user: TransferEngine) -> None:
        self.told: list[bytes] = []
        self.sent = 0
        owner.serve("written", lambda payload, _: self.told.append(payload))
        self.target, self.source = owner.allocate(SIZE, prefault=True), user.allocate(SIZE, prefault=True)
        self.remote = user.import_region(self.target.descriptor(), timeout_s=60)
        self.user = user
        self.source.view()[:] = PATTERN

    def move(self) -> dict[str, int]:
        """One transfer, with a notification behind it."""
        self.target.view()[:] = bytes(SIZE)
        before = sent()
        self.user.write(self.source, self.remote, [[0, 0, SIZE]], notify=("written", b"all")).wait(DEADLINE_S)
        assert bytes(self.target.view()) == PATTERN
        counted = since(before)
        self.sent += 1
        wait_for("the notification does not come", lambda: len(self.told) == self.sent)
        return counted

    def notices(self) -> int:
        """How many notifications the driver has carried, once it was one: of writes that one rail has."""
        wait_for("the driver does not carry a notification", self._notify)
        wait_for("not all notifications come", lambda: len(self.told) == self.sent)
        return sum(row["notices_sent"] for row in self.user.stats().values())

    def _notify(self) -> bool:
        self.user.write(self.source, self.remote, [[0, 0, SMALL]], notify=("written", b"small")).wait(
            DEADLINE_S
        )
        self.sent += 1
        return any(row["notices_sent"] for row in self.user.stats().values())

    def lose(self, *links: Link) -> dict[str, Any]:
        """Links go down in the middle of a transfer, which survives it; what was left, and what failed."""
        errors = self.errors()
        transfer = self.user.write(self.source, self.remote, [[0, 0, SIZE]] * ROUNDS)
        wait_for("the transfer does not begin", lambda: transfer.bytes_done > SIZE // 4)
        for link in links:
            link.down()
        left = transfer.nbytes - transfer.bytes_done
        transfer.wait(DEADLINE_S)
        failed = {device: count - errors[device] for device, count in self.errors().items()}
        return {"left": left, "errors": failed}

    def errors(self) -> dict[str, int]:
        """Failed operations of each NIC's rails."""
        counts = dict.fromkeys(SENDERS, 0)
        for rail in self.user.rails():
            nic = rail.device.removeprefix("rxe_").partition(":")[0]
            if nic in counts:
                counts[nic] += rail.errors
        return counts

    def read_back(self) -> dict[str, int]:
        """Read what was written, into other memory."""
        place = self.user.allocate(SIZE)
        before = sent()
        self.user.read(place, self.remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
        assert bytes(place.view()) == PATTERN
        place.close()
        return since(before)


def over_four_nics() -> dict[str, Any]:
    """Four NICs send and four receive: all of a transfer, with losses, without a link, without any."""
    report: dict[str, Any] = {}
    with (
        TransferEngine(config(4, 5, 6, 7, tcp="127.0.0.1")) as owner,
        TransferEngine(config(0, 1, 2, 3, tcp="127.0.0.1")) as user,
    ):
        mover = Mover(owner, user)
        links = [Link(nic) for nic in SENDERS]
        report["whole"] = mover.move()
        report["back"] = mover.read_back()
        run("tc", "qdisc", "add", "dev", "lab0", "root", "netem", "loss", "1%")
        report["lossy"] = mover.move()

        def lost_some() -> bool:
            return dropped("lab0") > 0 or not mover.move()

        wait_for("netem drops nothing", lost_some)
        report["dropped"] = dropped("lab0")
        run("tc", "qdisc", "del", "dev", "lab0", "root")
        report["lost_one"] = mover.lose(links[1])
        report["without_lab1"] = mover.move()
        links[1].up()
        wait_for("lab1 is not used again", lambda: mover.move()["lab1"] > SIZE // 32)
        report["notices"] = mover.notices()
        report["pyverbs_notices"] = send_notices(owner)
        report["lost_all"] = mover.lose(*links)
        report["without_any"] = mover.move()
        report["rails"] = [[rail.driver, rail.device, rail.bytes, rail.errors] for rail in user.rails()]
    return report


def main() -> None:
    """Write one JSON document to standard output."""
    (verbs,) = [status for status in probe_drivers() if status.name == "verbs"]
    report: dict[str, Any] = {"devices": verbs.devices, "reason": verbs.reason, "doctor": ask_doctor()}
    # From here on pyverbs is asked in this process: one of its own would start too slowly here.
    find_pyverbs()
    plugin.is_installed = lambda: False
    report["opened"] = str(plugin.probe({}))
    report["pyverbs"] = with_pyverbs()
    report["nics"] = over_four_nics()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
