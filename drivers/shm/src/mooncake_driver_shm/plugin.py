"""Describes the driver to the engine. Importing this does not need the compiled core."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from mooncake_driver_shm.options import render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PRIORITY = 100  # nothing is faster between two processes of one host
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def probe() -> Available | Unavailable:
    """Look for what the driver needs of the system: Linux, its /proc, and the compiled core."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return Unavailable(
            "shared memory between engines needs Linux with memfd_create (glibc 2.27 or newer)"
        )
    if not os.access(BOOT_ID, os.R_OK):
        return Unavailable(
            f"cannot read {BOOT_ID}, by which two processes know that they share a host; mount /proc"
        )
    if importlib.util.find_spec("mooncake_driver_shm._core") is None:
        return Unavailable(
            "the compiled core of mooncake-driver-shm is missing; reinstall it, with a C++20 compiler at hand"
        )
    return Available(("main memory",))


def load() -> object:
    """Return the capsule with the driver's C functions."""
    from mooncake_driver_shm import _core

    return _core.driver()


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "shm",
            frozenset({"dram"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            trusted_probe=True,
        ),
    ]
