"""Builds the test double of libcuda and lets engines find it: those of this process and of its children."""

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

from mooncake_transfer import drivers

__all__ = ["build", "installed"]

HERE = Path(__file__).parent
DRIVER = HERE.parents[1]
ABI = (DRIVER / "abi", DRIVER.parents[1] / "abi")  # in an sdist, and in the repository


@lru_cache(maxsize=1)
def _objects() -> dict[str, Path]:
    """Compile it once in a session; the folder goes with this process."""
    folder = _folder()
    (abi,) = [folder for folder in ABI if folder.is_dir()]
    compiler = os.environ.get("CXX", "c++").split()
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]
    built = {}
    for source in sorted(HERE.glob("*.cpp")):
        built[source.stem] = folder / f"{source.stem}.o"
        command = [*compiler, *flags, f"-I{DRIVER / 'core'}", f"-I{abi}", "-c", str(source), "-o"]
        subprocess.run([*command, str(built[source.stem])], check=True)
    return built


def build(**settings: int) -> Path:
    """Link a double of its own. ``settings``: VERSION, DEVICES, PEERS, FABRIC, IPC, FIRST, INIT_ERROR.

    VERSION (as cuDriverGetVersion says it) also decides which functions there are.
    """
    version = settings.get("VERSION", 13000)
    without = {name for name, since in (("batch_12", 12080), ("batch_13", 13000)) if version < since}
    objects = [str(path) for name, path in _objects().items() if name not in without]
    folder = _folder()
    lines = [f"{name} {value}\n" for name, value in settings.items()]
    (folder / "settings").write_text("".join(lines))
    library = folder / "libcuda.so.1"
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, "-shared", "-pthread", *objects, "-ldl", "-o", str(library)], check=True)
    return library


def _folder() -> Path:
    """Make a folder that is removed when this process ends, and not when a forked child does."""
    folder, maker = Path(tempfile.mkdtemp(prefix="libcuda-double-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == maker else None)
    return folder


@contextmanager
def installed(**settings: int) -> Iterator[Path]:
    """Have processes that start now find a double as libcuda.so.1. ``settings``: as for ``build``."""
    library = build(**settings)
    before = {name: os.environ.get(name) for name in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    os.environ["LD_LIBRARY_PATH"] = str(library.parent)
    os.environ["PYTHONPATH"] = str(HERE)  # peers make GPU memory by cuda_memory.py
    drivers._forget()  # what a probe said before
    try:
        yield library
    finally:
        drivers._forget()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
