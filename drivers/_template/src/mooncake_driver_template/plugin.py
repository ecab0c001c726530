"""Describes the driver to the engine. Importing this needs neither the compiled core nor the hardware."""

from __future__ import annotations

import importlib.util
import sys

from mooncake_driver_template.options import render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PRIORITY = 5  # higher is tried first: shm has 100, tcp 10


def probe() -> Available | Unavailable:
    """Look for what the driver needs. Real hardware: find devices and the vendor's library, but load nothing.

    The answer is for people: name the devices, or say what is missing and what would help.
    """
    if sys.platform != "linux":
        return Unavailable("abstract sockets need Linux")
    if importlib.util.find_spec("mooncake_driver_template._core") is None:
        return Unavailable(
            "the compiled core is missing; reinstall mooncake-driver-template, with a C++20 compiler at hand"
        )
    return Available(("local sockets",))


def load() -> object:
    """Return the capsule with the driver's C functions. Called once, after a good probe."""
    from mooncake_driver_template import _core

    return _core.driver()


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "template",
            frozenset({"dram"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            # Real hardware: leave this out when the probe loads a vendor's library.
            trusted_probe=True,
        )
    ]
