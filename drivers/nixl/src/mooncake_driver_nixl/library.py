"""Loads NIXL, in a way that lets the process end cleanly.

NIXL's wheel has a libnl-route of its own. Where the machine has one too, and its RDMA libraries load it, the
machine's copy looks its functions up in the wheel's when the process ends, takes down what the other one set
up, and the process crashes in its last moment. Once the machine's copy is loaded before, and bound to itself,
both end in peace.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

__all__ = ["MODULES", "find", "load"]

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
PART = "_api.py"  # of each of them
BOUND_FIRST = ("libnl-3.so.200", "libnl-route-3.so.200")


def find() -> str:
    """Name of the module that NIXL is installed as; empty when it is not."""
    return next((name for name in MODULES if _is_nixl(name)), "")


def _is_nixl(name: str) -> bool:
    # Another module may have this name, such as a script beside the one that runs; NIXL's is a package.
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / PART).is_file() for place in places or ())


@functools.cache
def load() -> Any:
    """NIXL's Python module. Raises ImportError with the reason when it is not there or cannot be loaded."""
    for name in BOUND_FIRST:
        with contextlib.suppress(OSError):  # not on this machine: then there is nothing to mix up
            ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    name = find()
    if not name:
        raise ImportError(f"NIXL is not installed (looked for {', '.join(MODULES)})")
    module = importlib.import_module(name)
    # It writes to standard output, which belongs to the program: its lines go where those of the program go.
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    return module
