"""Describes the driver to the engine. Importing this does not need the compiled core."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mooncake_driver_cxl.options import render
from mooncake_driver_cxl.pool import allocate
from mooncake_transfer.hooks import Available, DriverInfo, EndpointSpec, Unavailable, hookimpl
from mooncake_transfer.memory import Memory

__all__ = ["endpoints", "load", "mooncake_transfer_drivers", "probe"]

PRIORITY = 105  # who names a pool wants its memory reached there, and not by system calls of shm
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DAX_DEVICES = Path("/sys/bus/dax/devices")


def probe() -> Available | Unavailable:
    """Look for what the driver needs of the system, and for DAX devices. A pool may lie in a file, too."""
    if sys.platform != "linux" or not os.access(BOOT_ID, os.R_OK):
        return Unavailable(f"pools of memory need Linux, and {BOOT_ID} to tell machines apart; mount /proc")
    if importlib.util.find_spec("mooncake_driver_cxl._core") is None:
        return Unavailable(
            "the compiled core of mooncake-driver-cxl is missing; reinstall it, with a C++20 compiler at hand"
        )
    devices = sorted(f"/dev/{entry.name}" for entry in DAX_DEVICES.glob("dax*"))
    return Available(tuple(devices) or ("files on pmem, hugetlbfs or tmpfs",))


def load() -> object:
    """Return the capsule with the driver's C functions."""
    from mooncake_driver_cxl import _core

    return _core.driver()


def endpoints(options: Mapping[str, object]) -> Sequence[EndpointSpec] | Unavailable:
    """Turn a user's options into the one endpoint to open; without a pool there is none."""
    rendered = render(options)
    if not rendered["path"]:
        return Unavailable("it has no pool: set driver_options['cxl']['path'] to a DAX device or a file")
    return [EndpointSpec("", rendered)]


def _allocate(options: Mapping[str, object], name: str, nbytes: int) -> Memory:
    return allocate(dict(options), name, nbytes)


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "cxl",
            frozenset({"dram"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            endpoints=endpoints,
            trusted_probe=True,
            allocate=_allocate,
        ),
    ]
