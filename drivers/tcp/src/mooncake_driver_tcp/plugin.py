"""Describes the driver to the engine. Importing this needs neither the compiled core nor a network."""

from __future__ import annotations

import importlib.util

from mooncake_driver_tcp.options import endpoints, render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PRIORITY = 10  # everything faster goes first


def probe() -> Available | Unavailable:
    """Look for the compiled core; sockets are everywhere."""
    if importlib.util.find_spec("mooncake_driver_tcp._core") is None:
        return Unavailable(
            "the compiled core of mooncake-driver-tcp is missing; reinstall it, with a C++20 compiler at hand"
        )
    return Available(("sockets",))


def load() -> object:
    """Return the capsule with the driver's C functions."""
    from mooncake_driver_tcp import _core

    return _core.driver()


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "tcp",
            frozenset({"dram"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            trusted_probe=True,
            network=True,
            endpoints=endpoints,
        )
    ]
