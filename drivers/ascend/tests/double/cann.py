"""Builds doubles of CANN's libraries into a folder laid out as CANN, and the shim against it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from mooncake_driver_ascend.shim_build import build_shim
from mooncake_transfer import drivers
from mooncake_transfer.testing.compiling import compiled, cxx

__all__ = ["build", "installed", "shim_of"]

HERE = Path(__file__).parent
LIBRARIES = {"libascendcl.so": "acl.cpp", "libcann_hixl.so": "hixl.cpp"}
FLAGS = ("-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared")


@lru_cache(maxsize=1)
def build() -> Path:
    """A folder for this process, which goes with it."""
    cann, maker = Path(tempfile.mkdtemp(prefix="cann-double-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(cann, ignore_errors=True) if os.getpid() == maker else None)
    shutil.copytree(HERE / "include", cann / "include")
    (cann / "lib64").mkdir()
    others: list[Path] = []
    for name, source in LIBRARIES.items():
        own = (f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN")
        others.append(compiled(name, [HERE / source], *FLAGS, *own, include=[HERE / "include"], link=others))
        shutil.copy(others[-1], cann / "lib64")
    build_shim(cann, shim_of(cann / "home"), compiler=cxx()[0])
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
