"""What `test_wheels.py` runs in an environment that has the transfer layer and one driver: one JSON object.

``one_driver.py NAME OPTIONS SOURCE``: imports the driver's package, asks the doctor, and, unless SOURCE is
empty, moves bytes between two engines. SOURCE: ``memory``, ``file``, or ``pool`` for the driver's own memory.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from mooncake_transfer import Region, TransferConfig, TransferEngine
from mooncake_transfer.cli import build_app
from mooncake_transfer.memory import FileSource

NBYTES = 1 << 20
WAIT_S = 60
PATTERN = bytes(range(256)) * (NBYTES // 256)


def verdict(name: str) -> dict[str, Any]:
    """What `mooncake doctor` says of the driver, and its exit status."""
    with redirect_stdout(StringIO()) as said:
        status = build_app()(["doctor", "--json"], standalone_mode=False)
    report = json.loads(said.getvalue())
    (found,) = report["drivers"]
    assert found["name"] == name, found
    about = {key: found[key] for key in ("usable", "devices", "reason")}
    return {**about, "broken": report["broken_plugins"], "doctor": status or 0}


@contextmanager
def place(engine: TransferEngine, source: str, driver: str) -> Iterator[Region]:
    """Bytes of the side that peers write to and read from."""
    if source == "file":
        with tempfile.TemporaryFile(dir=".") as file:
            file.truncate(NBYTES)
            yield engine.register(FileSource(file.fileno()))
    else:
        yield engine.allocate(NBYTES, driver=driver if source == "pool" else "")


def move(name: str, options: dict[str, str | int | float | bool], source: str) -> dict[str, Any]:
    """Write and read back, by nothing but the driver."""
    config = TransferConfig(drivers=(name,), driver_options={name: options})
    with TransferEngine(config) as owner, TransferEngine(config) as user, place(owner, source, name) as far:
        near = user.allocate(NBYTES, driver="")
        remote = user.import_region(far.descriptor(), timeout_s=WAIT_S)
        near.view()[:] = PATTERN
        user.write(near, remote, [[0, 0, NBYTES]]).wait(timeout_s=WAIT_S)
        near.view()[:] = bytes(NBYTES)
        user.read(near, remote, [[0, 0, NBYTES]]).wait(timeout_s=WAIT_S)
        moved = {rail.driver: rail.bytes for rail in user.rails() if rail.bytes}
        return {"same": near.view() == PATTERN, "moved": moved}


def main(name: str, options: str, source: str) -> None:
    """Write the report to standard output."""
    importlib.import_module(f"mooncake_driver_{name}")
    report = verdict(name)
    if source:
        report |= move(name, json.loads(options), source)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
