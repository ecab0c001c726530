"""Describes the driver to the engine. Importing this does not need the compiled core."""

from __future__ import annotations

from functools import partial

from mooncake_driver_nvmeof.options import render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl, lacking, load_core

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PACKAGE = "mooncake_driver_nvmeof"
PRIORITY = 30  # nothing else takes files, and it takes no memory of peers


def probe() -> Available | Unavailable:
    """Look for what the driver needs of the system: Linux, its /proc, and the compiled core."""
    found = lacking(PACKAGE, linux="the nvmeof driver needs Linux", boot_id="which tells hosts apart")
    return found or Available(("files and block devices",))


load = partial(load_core, PACKAGE)  # returns the capsule with the driver's C functions


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
