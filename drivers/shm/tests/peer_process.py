"""Another process with an engine of its own, which owns one region and obeys the tests line by line.

Usage: peer_process.py allocated|foreign NBYTES UID OPTIONS_JSON. Each line of its input is a command, which
it answers with one JSON value.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import numpy as np

from mooncake_driver_shm import plugin
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.drivers import select_drivers


def serve(engine: TransferEngine, kind: str, nbytes: int) -> None:
    """Own a region of ``nbytes``, all of them 7, until the input ends."""
    if kind == "allocated":
        region = engine.allocate(nbytes, name="peers-memory")
        bytes_ = np.frombuffer(region.view(), np.uint8)
    else:
        bytes_ = np.zeros(nbytes, np.uint8)
        region = engine.register(bytes_, name="peers-memory")
    bytes_[:] = 7
    answers: dict[str, Callable[[], object]] = {
        "describe": lambda: region.descriptor().hex(),
        "sum": lambda: int(bytes_.sum(dtype=np.uint64)),
        "close": region.close,
        "fill": lambda: bytes_.fill(9),
        "describe another": lambda: engine.allocate(nbytes).descriptor().hex(),
    }
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answers[line.strip()]()) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Become the given user, then serve."""
    kind, nbytes, uid, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    # Before it becomes another user, who may not read the files of this environment.
    select_drivers(None)
    plugin.load()
    if uid != os.getuid():
        os.setgid(uid)
        os.setuid(uid)
    with TransferEngine(TransferConfig(drivers=("shm",), driver_options={"shm": options})) as engine:
        serve(engine, kind, nbytes)


if __name__ == "__main__":
    main()
