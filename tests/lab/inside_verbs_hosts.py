"""Runs inside two guests: the first owns a region, the second writes it and reads it back by RDMA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mooncake_transfer import TransferConfig, TransferEngine

SIZE = 4 << 20
BARRIER_S = 200
DEADLINE_S = 120.0
# What the lab tells a guest.
RANK, ADDRESS, SHARED, BARRIER = (
    os.environ[f"VMLAB_{name}"] for name in ("RANK", "ADDR", "SHARED", "BARRIER")
)


def meet(name: str) -> None:
    """Wait for the other host."""
    subprocess.run([BARRIER, name, str(BARRIER_S)], check=True, timeout=BARRIER_S + 10)


def main() -> None:
    """Say on standard output of the second host whether the bytes arrived."""
    devices = os.environ["VMLAB_RDMA_DEVS"].split()[0].split(",")[0]
    verbs = {"devices": devices, "window_bytes": 1 << 20, "connect_timeout_ms": 60_000}
    config = TransferConfig(
        host=ADDRESS, drivers=("verbs",), driver_options={"verbs": verbs}, connect_timeout_s=60
    )
    descriptor = Path(SHARED, "descriptor")
    pattern = bytes(range(256)) * (SIZE // 256)
    with TransferEngine(config) as engine:
        region = engine.allocate(SIZE)
        if RANK == "0":
            descriptor.write_bytes(region.descriptor())
        meet("ready")
        if RANK == "1":
            remote = engine.import_region(descriptor.read_bytes(), timeout_s=60)
            region.view()[:] = pattern
            engine.write(region, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
            region.view()[:] = bytes(SIZE)
            engine.read(region, remote, [[0, 0, SIZE]]).wait(DEADLINE_S)
            sys.stdout.write(f"arrived over verbs: {bytes(region.view()) == pattern}\n")
        meet("done")


if __name__ == "__main__":
    main()
