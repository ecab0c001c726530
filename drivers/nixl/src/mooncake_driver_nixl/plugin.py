"""Describes the driver to the engine. Importing this does not need NIXL."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from mooncake_driver_nixl.library import find
from mooncake_driver_nixl.options import render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PRIORITY = 20  # before tcp; drivers of this project for the same fabric need less of the processor


def probe() -> Available | Unavailable:
    """Look whether NIXL is installed; it is not loaded."""
    name = find()
    if not name:
        return Unavailable('NIXL is not installed; pip install "mooncake-driver-nixl[cu12]"')
    try:
        return Available((f"{name} {version(name)}",))
    except PackageNotFoundError:
        return Available((name,))


def load() -> object:
    """Return the capsule with the driver's C functions."""
    from mooncake_driver_nixl.endpoint import NixlEndpoint
    from mooncake_transfer.python_driver import capsule

    return capsule("nixl", NixlEndpoint)


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "nixl",
            frozenset({"dram"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            network=True,
            trusted_probe=True,
        ),
    ]
