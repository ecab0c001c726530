"""Describes the driver to the engine. Importing this needs neither the compiled core nor a network."""

from __future__ import annotations

from functools import partial

from mooncake_driver_tcp.options import endpoints, render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl, lacking, load_core

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PACKAGE = "mooncake_driver_tcp"
PRIORITY = 10  # everything faster goes first


def probe() -> Available | Unavailable:
    """Look for the compiled core; sockets are everywhere."""
    return lacking(PACKAGE) or Available(("sockets",))


load = partial(load_core, PACKAGE)  # returns the capsule with the driver's C functions


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
