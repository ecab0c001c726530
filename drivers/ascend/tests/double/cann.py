"""Builds doubles of CANN's libraries into a folder laid out as CANN, and the shim against it."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from mooncake_driver_ascend.shim_build import build_shim
from mooncake_transfer import drivers

__all__ = ["build", "installed", "shim_of"]

HERE = Path(__file__).parent
LIBRARIES = {"libascendcl.so": "acl.cpp", "libcann_hixl.so": "hixl.cpp"}


@lru_cache(maxsize=1)
def build() -> Path:
    """Compile them once in a session; the folder goes with this process."""
    cann, maker = Path(tempfile.mkdtemp(prefix="cann-double-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(cann, ignore_errors=True) if os.getpid() == maker else None)
    shutil.copytree(HERE / "include", cann / "include")
    (cann / "lib64").mkdir()
    compiler = os.environ.get("CXX", "c++").split()
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fPIC",
        "-fvisibility=hidden",
        "-shared",
    ]
    others: list[str] = []
    for name, source in LIBRARIES.items():
        library = str(cann / "lib64" / name)
        command = [*compiler, *flags, f"-I{cann / 'include'}", str(HERE / source), *others]
        command += ["-pthread", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}", "-o", library]
        subprocess.run(command, check=True)
        others.append(library)
    home = cann / "home"
    build_shim(cann, shim_of(home), compiler=compiler[0])
    return cann


def shim_of(home: Path) -> Path:
    """Where the shim of a user with this home is."""
    return home / ".cache" / "mooncake" / "ascend-shim-1.so"


@contextmanager
def installed() -> Iterator[Path]:
    """Have processes that start now find them, as after CANN's set_env.sh and ``build-shim``."""
    cann = build()
    wanted = {
        "LD_LIBRARY_PATH": str(cann / "lib64"),
        "HOME": str(cann / "home"),
        "PYTHONPATH": str(HERE),  # peers make device memory by npu_memory.py
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    drivers._forget()  # what a probe said before
    try:
        yield cann
    finally:
        drivers._forget()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
