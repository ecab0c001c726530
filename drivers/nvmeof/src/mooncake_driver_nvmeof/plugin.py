"""Describes the driver to the engine. Importing this does not need the compiled core."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from mooncake_driver_nvmeof.options import render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PRIORITY = 30  # nothing else takes files, and it takes no memory of peers
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def probe() -> Available | Unavailable:
    """Look for what the driver needs of the system: Linux, its /proc, and the compiled core."""
    if sys.platform != "linux":
        return Unavailable("the nvmeof driver needs Linux")
    if not os.access(BOOT_ID, os.R_OK):
        return Unavailable(f"cannot read {BOOT_ID}, which tells hosts apart; mount /proc")
    if importlib.util.find_spec("mooncake_driver_nvmeof._core") is None:
        return Unavailable(
            "the compiled core of mooncake-driver-nvmeof is missing; "
            "reinstall it, with a C++20 compiler at hand"
        )
    return Available(("files and block devices",))


def load() -> object:
    """Return the capsule with the driver's C functions."""
    from mooncake_driver_nvmeof import _core

    return _core.driver()


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    kinds = frozenset({"dram", "cuda", "file", "block"})
    return [
        DriverInfo(
            "nvmeof",
            kinds,
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            trusted_probe=True,
        )
    ]
