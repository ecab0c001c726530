"""Describes the driver to the engine. Importing this does not need the compiled core."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mooncake_driver_ascend.options import endpoints, render
from mooncake_driver_ascend.shim_build import default_shim
from mooncake_transfer.hooks import (
    Available,
    DriverInfo,
    Unavailable,
    hookimpl,
    lacking,
    load_core,
    load_library,
)

__all__ = ["find_npus", "load", "mooncake_transfer_drivers", "probe"]

PACKAGE = "mooncake_driver_ascend"
PRIORITY = 80  # before the network; an NPU and its peer are mostly on different hosts
LIBRARY = "libascendcl.so"
REMEDY = "install CANN, and source its set_env.sh in this shell, or name the file with option library"
REPEATED = 100002  # ACL_ERROR_REPEAT_INITIALIZE


def probe(options: Mapping[str, object]) -> Available | Unavailable:
    """Look for CANN's runtime, NPUs, and the shim over HIXL, where the options say."""
    shim = options.get("shim") or default_shim()
    return lacking(PACKAGE, linux="CANN runs on Linux only") or find_npus(
        str(options.get("library") or LIBRARY), Path(str(shim))
    )


def find_npus(library: str, shim: Path) -> Available | Unavailable:
    """Ask an ACL runtime for its NPUs."""
    acl = load_library([library], REMEDY)
    if isinstance(acl, Unavailable):
        return acl
    if (code := acl.aclInit(None)) not in (0, REPEATED):
        return Unavailable(f"aclInit fails with ACL error {code}; look at npu-smi info and ~/ascend/log")
    count = ctypes.c_uint32()
    if (code := acl.aclrtGetDeviceCount(ctypes.byref(count))) or not count.value:
        return Unavailable(
            f"ACL shows no NPU (error {code}); look at npu-smi info and ASCEND_RT_VISIBLE_DEVICES, "
            "and in a container that /dev/davinci* are there"
        )
    if not shim.is_file():
        return Unavailable(
            f"{shim} is not there; run `mooncake-ascend build-shim` once on this machine, "
            "or name the file with option shim"
        )
    return Available(tuple(f"npu:{number}" for number in range(count.value)))


load = partial(load_core, PACKAGE)  # returns the capsule with the driver's C functions


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "ascend",
            frozenset({"cuda", "dram"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            network=True,
            endpoints=endpoints,
        ),
    ]
