"""Describes the driver to the engine. Importing this does not need the compiled core."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial

from mooncake_driver_nvlink.options import render
from mooncake_transfer.hooks import (
    Available,
    DriverInfo,
    Unavailable,
    hookimpl,
    lacking,
    load_core,
    load_library,
)

__all__ = ["load", "mooncake_transfer_drivers", "probe"]

PACKAGE = "mooncake_driver_nvlink"
PRIORITY = 90  # before every network; between two processes of one host, shm takes main memory first
LIBRARY = "libcuda.so.1"
LEAST_VERSION = 11040  # CUDA 11.4, as in core/library.hpp
DRIVER_REMEDY = "install NVIDIA's driver; in a container, start it with the NVIDIA runtime (--gpus all)"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NAME_BYTES = 96


def probe(options: Mapping[str, object]) -> Available | Unavailable:
    """Look for NVIDIA's driver library where the options say, its version, and GPUs.

    Makes no context: costs no GPU memory.
    """
    linux = "GPU memory is shared by descriptors over unix sockets, which needs Linux"
    return lacking(PACKAGE, linux=linux) or find_gpus(str(options.get("library") or LIBRARY))


def find_gpus(library: str) -> Available | Unavailable:
    """Ask a CUDA driver library for its GPUs."""
    cuda = load_library([library], DRIVER_REMEDY)
    if isinstance(cuda, Unavailable):
        return cuda
    number = ctypes.c_int()
    if (code := cuda.cuInit(0)) == NO_DEVICE:
        return Unavailable(
            "NVIDIA's driver shows no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES "
            "(with MIG it has to name a MIG instance)"
        )
    if code:
        return Unavailable(
            f"cuInit fails with CUDA error {code}; look at nvidia-smi, at who may open /dev/nvidia*, "
            "and whether kernel module and library are of one version"
        )
    cuda.cuDriverGetVersion(ctypes.byref(number))
    if number.value < LEAST_VERSION:
        found = f"{number.value // 1000}.{number.value % 1000 // 10}"
        return Unavailable(f"NVIDIA's driver is made for CUDA {found}, 11.4 is needed: install 470 or newer")
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return Available(tuple(_name(cuda, ordinal) for ordinal in range(number.value)))


def _name(cuda: ctypes.CDLL, ordinal: int) -> str:
    text = ctypes.create_string_buffer(NAME_BYTES)
    device = ctypes.c_int()
    failed = cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetName(text, NAME_BYTES, device)
    return f"cuda:{ordinal}" if failed else f"cuda:{ordinal} {text.value.decode(errors='replace')}"


load = partial(load_core, PACKAGE)  # returns the capsule with the driver's C functions


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the one driver of this package."""
    return [
        DriverInfo(
            "nvlink",
            frozenset({"cuda", "dram"}),
            priority=PRIORITY,
            probe=probe,
            load=load,
            options=render,
            network=True,
        ),
    ]
