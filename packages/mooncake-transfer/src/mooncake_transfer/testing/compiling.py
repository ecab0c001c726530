"""Doubles of vendors' libraries and native programs of tests: compiled once for all who need them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mooncake_transfer.testing.config import wanted_compiler

__all__ = ["compiled", "cxx"]

BUILD_S = 600  # on a busy machine
KEPT_S = 24 * 3600.0
HEADERS = ("*.h", "*.hpp")


def cxx() -> list[str]:
    """The command of the C++ compiler: that of CXX, or the first one found. Skips the test without one."""
    found = wanted_compiler() or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if found is None:
        pytest.skip("no C++ compiler to build what the test needs; set CXX")
    return found.split()


def compiled(
    name: str, sources: Sequence[Path], *flags: str, include: Sequence[Path] = (), link: Sequence[Path] = ()
) -> Path:
    """Compile and link C++ sources into a file of this name, or find what another process made of the same.

    Each result has a folder of its own, named after what it is made of: the compiler, the flags, the sources,
    every header beside them and under the folders of ``include``, and the objects and libraries of ``link``.
    It is removed a day after its last use.

    Args:
        flags: of the compiler, such as ``-shared``; C++20 and position-independent code go without saying.
        include: folders of headers.
        link: what is linked besides.

    Raises:
        subprocess.CalledProcessError: it does not compile; the compiler has said why on standard error.
    """
    includes = [f"-I{folder}" for folder in include]
    inputs = [*sources, *link]
    command = [*cxx(), "-std=c++20", "-fPIC", "-pthread", *includes, *map(str, inputs), *flags]
    headers = sorted(_headers([*include, *{source.parent for source in sources}]))
    folder = _home() / _digest(command, [*inputs, *headers])
    result = folder / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            folder.mkdir(exist_ok=True)
            unfinished = folder / f"{name}.unfinished"
            subprocess.run([*command, "-o", str(unfinished)], check=True, timeout=BUILD_S)
            unfinished.rename(result)
        os.utime(folder)
    return result


def _headers(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        for pattern in HEADERS:
            yield from folder.rglob(pattern)


def _digest(command: Sequence[str], files: Sequence[Path]) -> str:
    found = hashlib.sha256("\0".join(command).encode())
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:24]


def _home() -> Path:
    """This user's folder for results: nobody else may put a library there that we would load."""
    home = Path(tempfile.gettempdir(), f"mooncake-compiled-{os.getuid()}")
    home.mkdir(mode=0o700, exist_ok=True)
    about = home.lstat()
    if home.is_symlink() or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise PermissionError(f"{home} is not a folder of this user alone; remove it")
    for old in home.iterdir():
        if old.is_dir() and old.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(old, ignore_errors=True)
    return home
