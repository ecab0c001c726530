"""Builds the double of libfabric in double/, and sets it up."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mooncake_transfer import TransferConfig
from mooncake_transfer.testing.compiling import compiled

__all__ = ["CORE", "HERE", "INCLUDE", "config_over_the_double", "double", "double_library"]

HERE = Path(__file__).parent
CORE = HERE.parent / "core"
ABI = next(path for path in (HERE.parent / "abi", HERE.parents[2] / "abi") if path.is_dir())
INCLUDE = (CORE, ABI)


def double_library() -> Path:
    """The double, built."""
    sources = sorted((HERE / "double").glob("*.cpp"))
    flags = ("-O1", "-g", "-shared", "-fvisibility=hidden")
    return compiled("libfabric-double.so", sources, *flags, include=INCLUDE)


def double() -> ctypes.CDLL:
    """The double as this process has it."""
    return ctypes.CDLL(str(double_library()))


def config_over_the_double() -> TransferConfig:
    """Settings of an engine that has the driver, and the double in place of libfabric."""
    options = {"library": double()._name, "domain": "double0"}
    return TransferConfig(drivers=("efa",), driver_options={"efa": options})
