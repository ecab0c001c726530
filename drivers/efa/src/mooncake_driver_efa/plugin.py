"""Describes the driver to the engine. Importing this needs neither the compiled core nor libfabric."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial

from mooncake_driver_efa.options import endpoints, render
from mooncake_transfer.hooks import (
    Available,
    DriverInfo,
    Unavailable,
    hookimpl,
    lacking,
    load_core,
    load_library,
)

__all__ = ["find_libfabric", "load", "mooncake_transfer_drivers", "probe"]

PACKAGE = "mooncake_driver_efa"
PRIORITY = 60  # after what stays on one host, before sockets
LIBRARIES = ("libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1")
LEAST = (1, 17)  # as in core/fabric.cpp
REMEDY = (
    "install libfabric 1.17 or newer (Debian: libfabric1; for EFA the installer of AWS), or name its file "
    "with option library"
)


def probe(options: Mapping[str, object]) -> Available | Unavailable:
    """Look for the compiled core, and for libfabric where the options say."""
    named = options.get("library")
    return lacking(PACKAGE) or find_libfabric((str(named),) if named else LIBRARIES)


def find_libfabric(names: Sequence[str]) -> Available | Unavailable:
    """Take the first of these files that loads, as the core does, and look at its version."""
    library = load_library(names, REMEDY)
    return library if isinstance(library, Unavailable) else _judged(library._name, library)


def _judged(name: str, library: ctypes.CDLL) -> Available | Unavailable:
    try:
        number = library.fi_version()
    except AttributeError:
        return Unavailable(f"{name} is no libfabric: it has no fi_version; {REMEDY}")
    found = number >> 16 & 0xFFFF, number & 0xFFFF
    version = f"{found[0]}.{found[1]}"
    if found < LEAST:
        return Unavailable(f"{name} is version {version}, 1.17 is needed; {REMEDY}")
    return Available((f"{name} {version}",))


load = partial(load_core, PACKAGE)  # returns the capsule with the driver's C functions


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
