"""What the file tier needs of the system."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from mooncake_store.tiers.contract import Bytes

__all__ = ["Files", "OpenFile", "Piece", "Running"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes at ``offset`` of a file, from or to ``memory``."""

    offset: int
    memory: Bytes


class Running(Protocol):
    """Reads or writes under way."""

    def wait(self, deadline_s: float) -> None:
        """Until all are done. Raises OSError, or TierTimeout after the monotonic time ``deadline_s``: nothing
        is read into their memory any more then.
        """


class OpenFile(Protocol):
    """A file that is open; of one size while it is."""

    def start(self, pieces: Sequence[Piece], *, write: bool) -> Running:
        """Begin. Offsets and sizes of whole blocks of 4 KiB, and memory of :meth:`Files.scratch` or that was
        lent, are fast; all others work.
        """

    def sync(self) -> None:
        """Have what was written on the medium. Raises OSError."""

    def close(self) -> None:
        """Let go of it, when nothing is under way."""


class Files(Protocol):
    """A way to read and write files. Thread-safe.

    Attributes:
        name: ``io_uring by the nvmeof driver``, say.
    """

    name: str

    def open(self, path: str | os.PathLike[str]) -> OpenFile:
        """Open a file for reading and writing. Raises OSError."""

    def scratch(self, nbytes: int) -> AbstractContextManager[Bytes]:
        """Memory for a while, its address a multiple of 4 KiB. Raises MemoryError."""

    def lend_memory(self, memory: Bytes) -> None:
        """See :meth:`Tier.lend_memory`."""

    def close(self, timeout_s: float) -> None:
        """After all files."""
