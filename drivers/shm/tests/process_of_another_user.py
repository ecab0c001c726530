"""A process that becomes another user, owns a region of 7s and lives until its input ends.

Usage: process_of_another_user.py UID NBYTES OPTIONS_JSON. It writes one line: the region's descriptor in hex.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from mooncake_driver_shm import plugin
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.drivers import select_drivers


def main() -> None:
    """Become the user, then serve."""
    uid, nbytes, options = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    # Before it becomes another user, who may not read the files of this environment.
    select_drivers(None)
    plugin.load()
    os.setgid(uid)
    os.setuid(uid)
    with TransferEngine(TransferConfig(drivers=("shm",), driver_options={"shm": options})) as engine:
        region = engine.allocate(nbytes, name="owned-by-another-user")
        np.frombuffer(region.view(), np.uint8)[:] = 7
        sys.stdout.write(region.descriptor().hex() + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
