"""Builds the test double of libcuda and lets engines find it: those of this process and of its children."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mooncake_transfer import drivers
from mooncake_transfer.testing.compiling import compiled

__all__ = ["build", "installed"]

HERE = Path(__file__).parent
DRIVER = HERE.parents[1]
ABI = (DRIVER / "abi", DRIVER.parents[1] / "abi")  # in an sdist, and in the repository


def build(**settings: int) -> Path:
    """A double of its own. ``settings``: VERSION, DEVICES, PEERS, FABRIC, IPC, FIRST, INIT_ERROR.

    VERSION (as cuDriverGetVersion says it) also decides which functions there are.
    """
    version = settings.get("VERSION", 13000)
    without = {name for name, since in (("batch_12", 12080), ("batch_13", 13000)) if version < since}
    (abi,) = [folder for folder in ABI if folder.is_dir()]
    include = (DRIVER / "core", abi)
    flags = ("-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-c")
    objects = [
        compiled(f"{source.stem}.o", [source], *flags, include=include)
        for source in sorted(HERE.glob("*.cpp"))
        if source.stem not in without
    ]
    linked = compiled("libcuda.so.1", [], "-shared", "-ldl", link=objects)
    folder = _folder()
    lines = [f"{name} {value}\n" for name, value in settings.items()]
    (folder / "settings").write_text("".join(lines))
    return Path(shutil.copy(linked, folder))


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
