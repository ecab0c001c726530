"""Every domain is a rail with a thread of its own, and a transfer goes over all of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from fabric_double import config_over_the_double, double

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.testing import pattern
from mooncake_transfer.testing.fixtures import wait_until

NBYTES = 16 << 20
DEADLINE_S = 30.0


def over_two() -> TransferConfig:
    """Both devices of the double."""
    options = {"library": double()._name, "domains": "double0,double1"}
    return msgspec.structs.replace(config_over_the_double(), driver_options={"efa": options})


def threads() -> int:
    """How many of this process are the driver's."""
    names = (entry / "comm" for entry in Path("/proc/self/task").iterdir())
    return sum(name.read_text().strip() == "mc-efa" for name in names)


def test_a_transfer_is_striped_over_two_devices_with_a_thread_each() -> None:
    before = threads()
    with TransferEngine(over_two()) as owner:
        wait_until(lambda: threads() == before + 2, "both rails have a thread")
        with TransferEngine(over_two()) as user:
            target, source = owner.allocate(NBYTES), user.allocate(NBYTES)
            np.frombuffer(source.view(), np.uint8)[:] = pattern(1, NBYTES)
            remote = user.import_region(target.descriptor())
            user.write(source, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
            assert bytes(target.view()) == bytes(source.view())
            carried = {rail.device: rail.bytes for rail in user.rails() if rail.bytes > 0}
            assert set(carried) == {"double0", "double1"}
            assert min(carried.values()) > NBYTES // 8
