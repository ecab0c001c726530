"""Describes the driver to the engine. Importing this needs neither the compiled core, nor libibverbs."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from mooncake_driver_verbs.devices import Port, ports, reason_for_none
from mooncake_driver_verbs.opened import Opened, is_installed, open_devices
from mooncake_driver_verbs.options import endpoints, render
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl, lacking, load_core

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PACKAGE = "mooncake_driver_verbs"
PRIORITY = 60  # after what stays within a host, before sockets
LIBRARY = "libibverbs.so.1"
LOADER_CACHE = Path("/etc/ld.so.cache")
LEAST_LOCKED_BYTES = 64 << 20
CAP_IPC_LOCK = 14


def probe(options: Mapping[str, object]) -> Available | Unavailable:
    """Look for an active port, the library, and the right to lock memory. Loads nothing but pyverbs.

    A library that the options name may know devices that sysfs does not (``options.endpoints_of``), so it is
    only looked for.
    """
    if missing := lacking(PACKAGE):
        return missing
    library = str(options.get("library") or "")
    reason = _missing(library) if library else reason_for_none() or _not_installed(LIBRARY)
    if reason:
        return Unavailable(reason)
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if most != resource.RLIM_INFINITY and most < LEAST_LOCKED_BYTES and not _may_lock_anything():
        return Unavailable(
            f"this process may lock {most} bytes of memory, too few to register any; "
            "raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity of its unit)"
        )
    return _usable([port for port in ports() if port.active], None if library else open_devices())


def _usable(active: list[Port], opened: Mapping[str, Opened | str] | None) -> Available | Unavailable:
    if opened is None:
        return Available(tuple(str(port) for port in active))
    named = []
    reasons = {}
    for port in active:
        found = opened.get(port.device, "libibverbs does not list it")
        if isinstance(found, Opened):
            named.append(str(port) + found.describe(port.number))
        else:
            reasons[port.device] = found
    if named:
        return Available(tuple(named))
    told = "; ".join(f"{device}: {reason}" for device, reason in reasons.items())
    return Unavailable(
        f"libibverbs cannot open a device that has an active port ({told}); install its provider (Debian: "
        "ibverbs-providers), or let this process open /dev/infiniband"
    )


def _missing(library: str) -> str:
    """Say why the library that option ``library`` names is not to be had; empty: it is, or loading tells."""
    if "/" not in library:
        return _not_installed(library)
    if Path(library).is_file():
        return ""
    return f"{library}, which option library names, is not there; correct it, or leave it out: the system's"


def _not_installed(library: str) -> str:
    # Without loading it: its code is not ours, and a probe must not hang. Where there is no cache, loading
    # will tell.
    with suppress(OSError):
        if library.encode() + b"\0" not in LOADER_CACHE.read_bytes():
            return (
                f"{library} is not among the libraries that ldconfig knows; install it (Debian: libibverbs1 "
                "and ibverbs-providers), run ldconfig, or name its file with option library"
            )
    return ""


def _may_lock_anything() -> bool:
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "CapEff":
                return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False


load = partial(load_core, PACKAGE)  # returns the capsule with the driver's C functions


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "verbs",
            frozenset({"dram", "cuda"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            network=True,
            endpoints=endpoints,
            trusted_probe=not is_installed(),  # pyverbs is foreign code
        )
    ]
