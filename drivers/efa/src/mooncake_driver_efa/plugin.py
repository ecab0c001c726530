"""Describes the driver to the engine. Importing this needs neither the compiled core nor libfabric."""

from __future__ import annotations

import ctypes
import importlib.util

from mooncake_driver_efa.options import endpoints, render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PRIORITY = 60  # after what stays on one host, before sockets
LIBRARIES = ("libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1")


def probe() -> Available | Unavailable:
    """Look for the compiled core and for libfabric."""
    if importlib.util.find_spec("mooncake_driver_efa._core") is None:
        return Unavailable(
            "the compiled core of mooncake-driver-efa is missing; reinstall it, with a C++20 compiler at hand"
        )
    reasons = []
    for name in LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
        else:
            return Available((name,))
    return Unavailable("; ".join(reasons))


def load() -> object:
    """Return the capsule with the driver's C functions."""
    from mooncake_driver_efa import _core

    return _core.driver()


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "efa",
            frozenset({"dram", "cuda"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            endpoints=endpoints,
        )
    ]
