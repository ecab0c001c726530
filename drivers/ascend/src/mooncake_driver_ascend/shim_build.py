"""``mooncake-ascend build-shim``: compile the C functions over HIXL against the CANN of this machine.

HIXL's interface is C++ with strings and vectors of the compiler that CANN was built for, so it can be called
only by what was compiled for it. The source is part of this package; the result goes into the user's cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ShimError", "build_shim", "default_shim", "main"]

SOURCE = Path(__file__).parent / "shim" / "shim.cpp"
CANN = Path("/usr/local/Ascend/ascend-toolkit/latest")
VERSION = 1  # MC_ASCEND_SHIM_VERSION of shim.h
# First found. ADXL is the name before CANN 8.5.
LIBRARIES = ("libcann_hixl.so", "libhixl.so", "libadxl.so", "libllm_datadist.so")
HEADERS = ("hixl/hixl.h", "adxl/adxl_engine.h")
COMPILE_S = 300.0


class ShimError(Exception):
    """The shim cannot be built; the message says what is missing."""


def default_shim() -> Path:
    """Where the shim is put, and looked for."""
    return Path.home() / ".cache" / "mooncake" / f"ascend-shim-{VERSION}.so"


def build_shim(cann: Path, into: Path, *, compiler: str = "c++") -> Path:
    """Compile the shim against a CANN folder. Raises ShimError."""
    include = cann / "include"
    if not any((include / header).is_file() for header in HEADERS):
        raise ShimError(
            f"{include} has neither {' nor '.join(HEADERS)}; give the folder of CANN 8.2 or newer with --cann"
        )
    folders = [cann / "lib64", cann / "lib"]
    found = [folder / name for name in LIBRARIES for folder in folders if (folder / name).is_file()]
    if not found:
        raise ShimError(f"none of {', '.join(LIBRARIES)} is in {cann}/lib64")
    into.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{include}"]
    command += [str(SOURCE), str(found[0]), f"-Wl,-rpath,{found[0].parent}", "-o", str(into)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShimError(f"cannot run {compiler}: {error}; install a C++17 compiler") from error
    if done.returncode:
        raise ShimError(f"{' '.join(command)} failed:\n{done.stderr}")
    return into


def main(arguments: Sequence[str] | None = None) -> int:
    """The program ``mooncake-ascend``."""
    parser = argparse.ArgumentParser(prog="mooncake-ascend", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build-shim", help="compile the C functions over HIXL")
    build.add_argument("--cann", type=Path, default=CANN, help=f"where CANN is installed (default {CANN})")
    build.add_argument("--into", type=Path, default=default_shim(), help="the file to make")
    build.add_argument("--compiler", default="c++", help="one whose C++ library is CANN's (GCC)")
    given = parser.parse_args(arguments)
    try:
        sys.stdout.write(f"{build_shim(given.cann, given.into, compiler=given.compiler)}\n")
    except ShimError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
