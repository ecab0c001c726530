"""How engines of one host are found without a registry, and without a file that could be left behind.

Each engine holds an empty memory file whose name tells its address. The kernel shows the names of a process's
open files in /proc to other processes of the same user, and forgets them when the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Beacon", "engines_here"]

PREFIX = "mooncake-engine:"
SHOWN_AS = f"/memfd:{PREFIX}"

log = logging.getLogger(__name__)


class Beacon:
    """Shows the address of one engine to who looks for engines on this host."""

    def __init__(self) -> None:
        self._fd = -1

    def start(self, address: str) -> None:
        """Show ``address`` from now on. Without a free descriptor it is not shown, and that is all.

        Nor is one of more than 233 bytes, as the kernel has no room for it: a part would lead elsewhere.
        """
        try:
            self._fd = os.memfd_create(f"{PREFIX}{address}", os.MFD_CLOEXEC)
        except OSError as error:
            log.warning("engine %s will not be found by who looks for engines here: %s", address, error)

    def stop(self) -> None:
        """Show it no longer. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def engines_here(proc: Path = Path("/proc")) -> dict[str, int]:
    """Addresses of the engines on this host that this user may see, with the process of each.

    Engines in other containers, and of other users, are not among them.
    """
    found: dict[str, int] = {}
    for process in sorted(entry for entry in proc.iterdir() if entry.name.isdigit()):
        for name in _open_files(process):
            if name.startswith(SHOWN_AS):
                address = name.removeprefix(SHOWN_AS).removesuffix(" (deleted)")
                found.setdefault(address, int(process.name))
    return found


def _open_files(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has just ended, or belongs to somebody else
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield str(file.readlink())
